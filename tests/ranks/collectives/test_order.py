"""Ranks that are out of step, and objects that are closed or dropped in an unusual order."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import (
    NotAnArrayError,
    NotContiguousError,
    UnsupportedOpError,
)

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


def test_arrays_that_this_rank_does_not_hold_are_given_back(flat: allreduce.Topology) -> None:
    reduce = allreduce.create("shared", flat)
    kept = reduce.allocate(1000)
    held, files = [], len(os.listdir("/proc/self/fd"))  # a process may have no more than a thousand
    for _ in range(3):
        array = reduce.allocate(1000)
        if WORLD.rank == 0:
            held.append(array)
    del array
    assert len(os.listdir("/proc/self/fd")) == files
    for _ in range(5):
        reduce.allocate(1000)
    arrays = len(reduce._allocations.shared)
    kept[:] = WORLD.rank
    reduce(kept, "sum")
    assert (kept == sum(range(SIZE))).all()
    assert arrays == 1 + len(held)
    assert len(held) == (3 if WORLD.rank == 0 else 0)
    reduce.close()


def test_subclasses_of_arrays(topology_of: Callable[..., allreduce.Topology]) -> None:
    with allreduce.create("shared", topology_of(None)) as reduce:
        matrix = np.arange(6, dtype=np.float32).reshape(2, 3).view(np.matrix)
        reduce(matrix, "sum")
        assert (np.asarray(matrix) == SIZE * np.arange(6).reshape(2, 3)).all()
        with pytest.raises(NotAnArrayError):
            reduce(np.ma.masked_less(np.ones(4, np.float32), 0), "sum")
        with pytest.raises(NotAnArrayError, match="MaskedArray"):
            reduce.stack(np.ma.masked_less(np.ones(4, np.float32), 0))


@pytest.mark.parametrize("name", ["auto", "hierarchical_copy", "native", "ring", "shared"])
def test_where_stores_are_not_seen_in_order(
    name: str, topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors such as ARM's every meeting ends with a barrier, on all ranks or on none."""
    monkeypatch.setattr("allreduce.call.executor.ORDERED_STORES", False)
    topology = topology_of(2 if name == "hierarchical_copy" else None)
    with allreduce.create(name, topology) as reduce:
        for array in (reduce.allocate(10_003, "float32"), np.empty(10_003, np.float32)):
            for turn in range(20):
                array[:] = reduce.rank + turn
                reduce(array, "sum")
                assert (array == sum(range(reduce.size)) + turn * reduce.size).all()


@pytest.mark.parametrize("nodes", [None, 1])
def test_a_rank_alone_is_refused_where_calls_are_not_compared(
    nodes: int | None, topology_of: Callable[..., allreduce.Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """check=False on several nodes, or on a node without shared memory: the rank raises its error at once, and waits
    for nobody."""
    if nodes is None:
        monkeypatch.setattr("allreduce.call.rendezvous.Tables.take", lambda _: None)
    with allreduce.create("ring", topology_of(nodes), check=False) as reduce:
        if WORLD.rank == 0:
            with pytest.raises(NotContiguousError):
                reduce(np.zeros(8)[::2], "sum")
            with pytest.raises(UnsupportedOpError):
                reduce.bind(np.ones(3), "median")
            with pytest.raises(NotAnArrayError):
                reduce("no array")
        array = np.ones(10, np.float32)
        reduce(array, "sum")
        assert (array == reduce.size).all()
