"""Backend "shared" in two levels, along NUMA nodes, which are simulated."""

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.algorithms import shared
from tests.ranks.grid import compare, run_grid
from tests.ranks.variants import Staged, in_numa_nodes

SIZE = MPI.COMM_WORLD.size
pytestmark = pytest.mark.skipif(SIZE < 3, reason="two levels need three ranks")
SIZES = range(2, SIZE)  # of the groups; the last one is often smaller


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LEVELS_BYTES", 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("numa", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16"])
def test_grid(numa: int, dtype: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    with allreduce.create(in_numa_nodes(numa), flat) as reduce:
        run_grid(reduce, dtype, world)


@pytest.mark.usefixtures("always")
def test_grid_of_staged_arrays(flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    with allreduce.create(in_numa_nodes(2, Staged), flat) as reduce:
        run_grid(reduce, "float32", world)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("numa", SIZES)
def test_reduce_scatter(numa: int, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """A mean is scaled once. Then all_gather gives the bits of an all-reduce."""
    with allreduce.create(in_numa_nodes(numa), flat) as reduce:
        array, again = (reduce.allocate(100_003, "float64") for _ in range(2))
        rows = np.random.default_rng(1).standard_normal((SIZE, array.size))
        array[:] = again[:] = rows[reduce.rank]
        part = reduce.reduce_scatter(array)  # type: ignore[attr-defined]
        assert np.allclose(part, rows.mean(axis=0)[reduce.owned(array.size)])
        reduce.all_gather(array)
        reduce(again)
        assert np.array_equal(array, again)
        compare({"sum": zlib.adler32(array.view(np.uint8))}, world)


def test_groups_of_the_system(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm) -> None:
    """Found if every rank is bound to one of several NUMA nodes. Short arrays take one level."""
    nodes: Any = {
        "alternating": (lambda rank: rank % 2, [list(range(0, SIZE, 2)), list(range(1, SIZE, 2))]),
        "one": (lambda _: 0, []),
        "not bound": (lambda rank: -1 if rank == SIZE - 1 else rank % 2, []),
        "one rank each": (lambda rank: rank, []),
    }
    for node_of, groups in nodes.values():
        monkeypatch.setattr(shared, "numa_node", lambda node_of=node_of: node_of(flat.rank))
        with allreduce.create("shared", flat) as reduce:
            assert reduce._algorithm._groups == groups  # type: ignore[attr-defined]
            run_grid(reduce, "float32", world, (10, shared.LEVELS_BYTES // 4 + 7))


def test_one_writer_a_page(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm) -> None:
    """In each step the ranks write to chunks of whole pages, which do not overlap."""
    spans: dict[int, slice] = {}  # by the number of ranks that divide the array
    plan = shared._pages

    def noted(array: np.ndarray, parts: int, index: int) -> slice:
        spans[parts] = plan(array, parts, index)
        return spans[parts]

    monkeypatch.setattr(shared, "_pages", noted)
    with allreduce.create(in_numa_nodes(2), flat) as reduce:
        reduce(reduce.allocate(shared.LEVELS_BYTES // 4 + 5, "float32"), "sum")
    among_all = world.allgather((spans[SIZE].start, spans[SIZE].stop))
    assert all(before[1] == after[0] for before, after in pairwise(among_all))
    assert all(start % 1024 == 0 for start, _ in among_all)
    in_groups = world.allgather(spans.get(2))
    assert in_groups[0].start == 0
    assert in_groups[0].stop == in_groups[1].start, "the first two ranks divide the array"
