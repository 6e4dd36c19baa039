"""broadcast, collect and all_gather, on every backend: a NumPy loop starts equal and collects without mpi4py."""

from collections.abc import Callable, Generator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from grid import shapes
from mpi4py import MPI

import allreduce
from allreduce.base import AllReduce
from allreduce.errors import AllReduceError, DisagreementError, NotAnArrayError, OptionError, UnavailableError
from allreduce.messages import parcels
from allreduce.two_phase import TwoPhase
from allreduce.wrappers.wrapper import Wrapper

SIZE = MPI.COMM_WORLD.size
PLACES = [(name, shape) for name in allreduce.NAMES for shape in shapes(SIZE)]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def reduce(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    name, shape = request.param
    try:
        made = allreduce.create(name, topology_of(shapes(SIZE)[shape]))
    except UnavailableError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_broadcast(reduce: AllReduce, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PIECE", 1000)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    for root in {0, SIZE - 1}:
        for array in (
            np.empty(1001, kind),
            np.empty((2, 3, 4), kind, order="F"),
            np.empty((), kind),
            np.empty(0, kind),
        ):
            array[...] = reduce.rank == root
            reduce.broadcast(array, root)
            assert (array == np.ones((), kind)).all()
    if reduce.sums_half or dtype != "bfloat16":
        allocated = reduce.allocate(100, dtype) if reduce.rank else np.ones(100, kind)
        if reduce.rank == 0:
            reduce.allocate(100, dtype)
        reduce.broadcast(allocated[:50])
        assert (allocated[:50] == np.ones((), kind)).all()


def test_collect(reduce: AllReduce) -> None:
    assert reduce.collect(reduce.rank).tolist() == list(range(SIZE))
    assert reduce.collect(np.float32(0.5)).dtype == np.float32
    table = reduce.collect(np.full((2, 3), reduce.rank + 1, "int32").T)
    assert table.shape == (SIZE, 3, 2)
    assert (table == np.arange(1, SIZE + 1, dtype="int32").reshape(SIZE, 1, 1)).all()
    assert reduce.collect(np.empty((0, 3))).shape == (SIZE, 0, 3)


def test_all_gather(reduce: AllReduce) -> None:
    """From the slices that ranks own; those of hierarchical_copy are the same on all nodes."""
    for length in (0, 1, 1000):
        whole = np.arange(length, dtype="float32")
        buffer = np.full(length, -1, "float32")
        own = reduce.owned(length)
        buffer[own] = whole[own]
        reduce.all_gather(buffer)
        assert np.array_equal(buffer, whole)


def test_a_wrapper_owns_what_its_inner_backend_owns(reduce: AllReduce) -> None:
    with Wrapper(reduce.topology, inner=reduce) as wrapper:
        assert wrapper.owned(1000) == reduce.owned(1000)
        buffer = np.zeros(1000)
        buffer[wrapper.owned(1000)] = 1
        wrapper.all_gather(buffer)
        assert buffer.all()
        assert wrapper.collect(reduce.rank).tolist() == list(range(SIZE))


def test_cupy(monkeypatch: pytest.MonkeyPatch, flat: allreduce.Topology) -> None:
    cupy = fake_cupy.install(monkeypatch)
    with allreduce.create("ring", flat) as reduce:
        array = cupy.asarray(np.full(10, reduce.rank))
        assert (reduce.collect(array) == np.arange(SIZE).reshape(SIZE, 1)).all()
        reduce.broadcast(array, SIZE - 1)
        assert (array.get() == SIZE - 1).all()


def raised_everywhere(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert len(set(MPI.COMM_WORLD.allgather(str(raised.value)))) == 1
    return str(raised.value)


@pytest.mark.parametrize("check", ["first", "always"])
def test_named_errors(check: str, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, check=check) as reduce:
        assert "root=-1 is no rank" in raised_everywhere(OptionError, lambda: reduce.broadcast(np.zeros(3), -1))
        assert "root='0'" in raised_everywhere(OptionError, lambda: reduce.broadcast(np.zeros(3), "0"))  # type: ignore[arg-type]
        raised_everywhere(NotAnArrayError, lambda: reduce.broadcast([1.0]))
        raised_everywhere(NotAnArrayError, lambda: reduce.collect([1.0]))
        raised_everywhere(AllReduceError, lambda: reduce.collect(np.zeros(3, complex)))
        if SIZE > 1:
            rank = reduce.rank
            text = raised_everywhere(DisagreementError, lambda: reduce.broadcast(np.zeros(3), rank % 2))
            assert "rank 1: broadcast: length 3, dtype float64, ordinary memory, shape (3,), root 1" in text
            shape = (2, 3) if rank else (3, 2)
            raised_everywhere(DisagreementError, lambda: reduce.broadcast(np.zeros(shape)))
            raised_everywhere(DisagreementError, lambda: reduce.collect(np.zeros(2 + rank % 2)))
            call = (lambda: reduce.broadcast(np.zeros(4))) if rank else (lambda: reduce(np.zeros(4), "sum"))
            raised_everywhere(DisagreementError, call)
        reduce.broadcast(np.zeros(3))
    assert isinstance(reduce, TwoPhase)
