"""Random fits against one process, with loaders, and on shards and tables; `mpirun -n 3 python -m tests.sequences
loaders` (or files) runs them for hours."""

import allreduce
from tests.sequences.cases import KINDS, Cases
from tests.sequences.files import FILES, SOURCES
from tests.sequences.loaders import LOADERS

JOBS = "openmpi 1 2 3 5"


def test_random_fits_with_loaders(flat: allreduce.Topology) -> None:
    cases = Cases(LOADERS, flat, 1)
    cases.run(24)
    kinds = {outcome.partition(",")[0] for outcome in cases.calls}
    assert kinds >= set(KINDS[: len(KINDS) - (flat.size == 1)])


def test_random_fits_on_shards_and_tables(flat: allreduce.Topology) -> None:
    cases = Cases(FILES, flat, 14)  # 10 cases with all sources, kinds and options, files without rows, few files
    cases.run(10)
    sources, kinds = zip(*(outcome.split(", ") for outcome in cases.calls), strict=True)
    assert set(sources) == set(SOURCES)
    assert set(kinds) >= {"mirrored", "sharded", "central", *["servers"] * (flat.size > 1)}
