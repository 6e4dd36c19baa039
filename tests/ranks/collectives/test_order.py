"""Ranks that are out of step, arrays that are dropped in an unusual order, and bound calls."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import NotAnArrayError, NotContiguousError, OptionError, UnsupportedDtypeError, UnsupportedOpError
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size


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


@pytest.mark.parametrize("options", [{}, {"trace": "trace.json"}, {"check": False}])
@pytest.mark.parametrize("name", ["native", "reduce_to_one", "adasum"])
def test_backends_without_phases_say_which_have_them(
    flat: allreduce.Topology, tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    if "trace" in options:
        options = {"trace": flat.world.bcast(str(tmp_path / options["trace"]))}
    with allreduce.create(name, flat, **options) as reduce:
        array = np.ones(3 + reduce.rank)
        for call in (lambda: reduce.reduce_scatter(array), lambda: reduce.bind(array, "mean", "reduce_scatter")):
            text = raised_everywhere(flat.world, OptionError, call)
            assert text.startswith(f"{name!r} has no reduce_scatter; use a backend with two phases")
        reduce.bind(np.ones(3), kind="all_gather")()  # which all backends have
        reduce(np.ones(3), "adasum" if name == "adasum" else "mean")


def test_bad_arguments_are_refused_when_it_is_bound(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat) as reduce:
        for error, array, op in (
            (NotAnArrayError, [1.0], "sum"),
            (NotContiguousError, np.ones(10)[::2], "sum"),
            (UnsupportedOpError, np.ones(3), "median"),
            (UnsupportedDtypeError, np.ones(3, "complex64"), "sum"),
        ):
            raised_everywhere(flat.world, error, lambda array=array, op=op: reduce.bind(array, op))  # type: ignore[misc]
        for kind in ("broadcast", "all_to_all"):
            raised_everywhere(flat.world, OptionError, lambda kind=kind: reduce.bind(np.ones(3), "sum", kind))  # type: ignore[misc]


def test_another_shape_later_changes_nothing(flat: allreduce.Topology) -> None:
    """The function reduces the memory that it was bound to."""
    with allreduce.create("ring", flat) as reduce:
        array = np.ones((2, 3))
        bound = reduce.bind(array, "sum")
        array.shape = (6,)
        bound()
        assert (array == SIZE).all()


def test_threads(flat: allreduce.Topology) -> None:
    """The function may be called in another thread than the one that bound it, by one thread at a time."""
    with allreduce.create("ring", flat) as reduce:
        array = np.ones(3)
        bound = reduce.bind(array, "sum")
        thread = threading.Thread(target=bound)
        thread.start()
        thread.join()
        bound() if reduce.rank else reduce(array, "sum")  # the same call
        assert (array == SIZE**2).all()
