"""A backend that is traced, or whose calls are bound or submitted, gives the bits of an equal plain one: calls of every
kind with every option. `mpirun -n 3 python -m tests.sequences` makes random ones, for hours."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import allreduce
from tests.backends import SHARDED
from tests.ranks.grid import shapes
from tests.sequences.composition import Composition, Options

JOBS = "openmpi 1 2 3"

WORLD = MPI.COMM_WORLD
SHAPES = shapes(WORLD.size)
EAGER = allreduce.PowerSGD(2, start_powerSGD_iter=0)
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"exact": True},
    "not compared": {"check": False},
    **{name: {"compress": name} for name in ("bfloat16", "float16", "int8", "float8")},
    "powersgd": {"compress": EAGER},
}
CASES = [
    *((name, given, "traced", "flat") for name in ("ring", "shared", "auto") for given in GIVEN),
    *(("hierarchical_copy", given, "traced, bound", shape) for given in ("plain", "exact", "int8") for shape in SHAPES),
    *(("auto", given, "traced, submitted", shape) for given in ("exact", "powersgd") for shape in SHAPES),
    *((name, given, "submitted", "flat") for name in ("native", "shared") for given in ("plain", "exact")),
    *((name, given, "bound", "flat") for name in ("halving_doubling", "shared") for given in ("bfloat16", "exact")),
    *((name, "plain", "bound", "flat") for name in (*SHARDED, "native", "reduce_to_one")),
    *((name, "bfloat16", "traced", "flat") for name in ("reduce_to_one", "hierarchical_copy")),
    ("reduce_to_one", "exact", "again", "flat"),
]


@pytest.mark.parametrize(("name", "given", "way", "shape"), CASES, ids=["-".join(case) for case in CASES])
def test_the_bits_of_a_plain_backend(name: str, given: str, way: str, shape: str, tmp_path: Path) -> None:
    options = Options(name, way=way, per_node=SHAPES[shape], **GIVEN[given])
    if not Composition(WORLD, 3, WORLD.bcast(str(tmp_path)), options=options).run_each():
        pytest.skip("such a backend can't be made here")
