"""Random fits with loaders against one process; `mpirun -n 3 python -m tests.sequences loaders` runs them for hours."""

import allreduce
from tests.sequences.loaders import KINDS, Loaders


def test_random_fits_with_loaders(flat: allreduce.Topology) -> None:
    cases = Loaders(flat, 1)
    cases.run(24)
    kinds = {outcome.partition(",")[0] for outcome in cases.calls}
    assert kinds >= set(KINDS[: len(KINDS) - (flat.size == 1)])
