"""Calls of every kind with every option: their sums are NumPy's, and a backend that is traced, or whose calls are bound
or submitted, gives the bits of an equal plain one. `mpirun -n 3 python -m tests.sequences` makes random ones for hours.
"""

import zlib
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from allreduce.transport import chunked
from tests.backends import SHARDED
from tests.ranks.grid import shapes
from tests.sequences.composition import Composition
from tests.sequences.judging import Options

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SHAPES = shapes(WORLD.size)
EAGER = allreduce.PowerSGD(2, start_powerSGD_iter=0)
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"exact": True},
    "not compared": {"check": False},
    **{name: {"compress": name} for name in ("bfloat16", "float16", "int8")},
    "powersgd": {"compress": EAGER},
    "powersgd later": {"compress": allreduce.PowerSGD(2, start_powerSGD_iter=2)},
    "int8 in large blocks": {"compress": allreduce.Quantized(32 * 1024)},
    "int8 in small blocks": {"compress": allreduce.Quantized(8)},
}
CASES = [
    *((name, given, "traced", "flat") for name in ("ring", "shared", "auto") for given in GIVEN),
    *(("hierarchical_copy", given, "traced, bound", shape) for given in ("plain", "exact", "int8") for shape in SHAPES),
    *(("auto", given, "traced, submitted", shape) for given in ("exact", "powersgd") for shape in SHAPES),
    *(("ring", given, "bound", shape) for given in ("int8", "powersgd") for shape in SHAPES),
    *((name, given, "again", "flat") for name in ("native", "reduce_to_one") for given in ("int8", "powersgd")),
    *((name, given, "submitted", "flat") for name in ("native", "shared") for given in ("plain", "exact")),
    *((name, given, "bound", "flat") for name in ("halving_doubling", "shared") for given in ("bfloat16", "exact")),
    *((name, "plain", "bound", "flat") for name in dict.fromkeys((*SHARDED, "native", "reduce_to_one"))),
    *((name, "bfloat16", "traced", "flat") for name in ("reduce_to_one", "hierarchical_copy")),
    ("reduce_to_one", "exact", "again", "flat"),
]
if MPI.get_vendor()[0] == "MPICH":  # whose messages take longer
    CASES = CASES[::4]


@pytest.mark.parametrize(("name", "given", "way", "shape"), CASES, ids=["-".join(case) for case in CASES])
def test_the_bits_of_a_plain_backend(name: str, given: str, way: str, shape: str, tmp_path: Path) -> None:
    options = Options(name, way=way, per_node=SHAPES[shape], **GIVEN[given])
    seed = zlib.crc32(f"{name} {given} {way} {shape}".encode())
    if not Composition(WORLD, seed, WORLD.bcast(str(tmp_path)), options=options).run_each():
        pytest.skip("such a backend can't be made here")


SEEDS = (7, 8, 9, 11, 12) if WORLD.size == 2 else range(13, 19)  # 10 draws a backend that 2 ranks can't make


@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one moves arrays in pieces, as it moves those of more bytes than a call of MPI takes."""
    if seed % 2:
        monkeypatch.setattr(chunked, "PIECE", 1000)
    Composition(WORLD, seed, WORLD.bcast(str(tmp_path))).run(14)
