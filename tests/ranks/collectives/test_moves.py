"""broadcast, stack and all_gather with every backend: the start and the end of a NumPy loop, without mpi4py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.backend import AllReduce
from allreduce.errors import DisagreementError, NotAnArrayError, OptionError, UnsupportedDtypeError, UnsupportedOpError
from allreduce.transport import chunked
from tests.gpu import fake_cupy
from tests.ranks.counting import Counting
from tests.ranks.together import raised_everywhere
from tests.ranks.variants import Staged

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


@several
@pytest.mark.parametrize("name", ["native", "auto", "reduce_to_one"])
def test_a_stack_and_an_all_gather_are_one_call_of_mpi(
    name: str, flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a broadcast from one rank after the other. Of more than PIECE bytes they take a few calls, for any number of
    ranks."""
    with allreduce.create(name, flat) as reduce:
        holders = [reduce.executor, *getattr(reduce._algorithm, "_made", {"": reduce._algorithm}).values()]
        comm = reduce.executor.comm
        for bytes_of_a_call, most in ((chunked.PIECE, 1), (100, 5)):
            monkeypatch.setattr(chunked, "PIECE", bytes_of_a_call)
            monkeypatch.setattr(chunked, "SCRATCH_BYTES", 64 * SIZE)
            buffer = np.zeros(50 * SIZE + 1, "int32")
            own = reduce.owned(buffer.size)
            buffer[own] = np.arange(buffer.size)[own]
            for work in (partial(reduce.all_gather, buffer), lambda: reduce.stack(np.full(40, SIZE))):
                counting = Counting(comm)
                for holder in holders:
                    holder.comm = counting
                work()
                assert counting.calls.total() <= most, counting.calls
                assert counting.calls.total() or name == "auto"  # which gathers in shared memory
            for holder in holders:
                holder.comm = comm
            assert buffer.tolist() == list(range(buffer.size))
            assert reduce.stack(np.arange(40) + reduce.rank).tolist() == [
                [*range(rank, 40 + rank)] for rank in range(SIZE)
            ]


def test_elements_larger_than_the_memory_for_segments(topology_of: Callable[..., allreduce.Topology]) -> None:
    dtype = np.dtype("S1000001")
    for name in (Staged, "ring"):
        with allreduce.create(name, topology_of(None)) as reduce:
            whole, buffer = np.frombuffer(np.random.default_rng(1).bytes(5 * dtype.itemsize), dtype), np.zeros(5, dtype)
            buffer[reduce.owned(5)] = whole[reduce.owned(5)]
            reduce.all_gather(buffer)
            assert buffer.tobytes() == whole.tobytes()


def test_cupy(monkeypatch: pytest.MonkeyPatch, flat: allreduce.Topology) -> None:
    cupy = fake_cupy.install(monkeypatch)
    with allreduce.create("ring", flat) as reduce:
        array = cupy.asarray(np.full(10, reduce.rank))
        assert (reduce.stack(array) == np.arange(SIZE).reshape(SIZE, 1)).all()
        reduce.broadcast(array, SIZE - 1)
        assert (array.get() == SIZE - 1).all()
        found, sums = reduce.sparse(cupy.asarray(np.array([reduce.rank])), cupy.asarray(np.ones((1, 2))), SIZE, "sum")
        assert type(found) is type(sums) is type(array)
        assert (found.get().tolist(), sums.get().tolist()) == (list(range(SIZE)), [[1.0, 1.0]] * SIZE)


def test_named_errors(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat) as reduce:
        for kind, words, call in (
            (OptionError, "root must be a rank of this topology, 0 to", partial(reduce.broadcast, np.zeros(3), -1)),
            (OptionError, "got '0'", partial(reduce.broadcast, np.zeros(3), "0")),
            (NotAnArrayError, "", partial(reduce.broadcast, [1.0])),
            (NotAnArrayError, "", partial(reduce.stack, [1.0])),
            (UnsupportedDtypeError, "", partial(reduce.stack, np.zeros(3, object))),
        ):
            assert words in raised_everywhere(WORLD, kind, call)
        if SIZE > 1:
            text = raised_everywhere(WORLD, DisagreementError, lambda: reduce.broadcast(np.zeros(3), reduce.rank % 2))
            assert "rank 1: broadcast: length 3, dtype float64, ordinary memory, root 1" in text
            shape = (2, 3) if reduce.rank else (3, 2)
            raised_everywhere(WORLD, DisagreementError, lambda: reduce.broadcast(np.zeros(shape)))


@pytest.mark.parametrize("name", ["ring", "native", "shared", "auto"])
def test_references_are_refused(name: str, flat: allreduce.Topology) -> None:
    with allreduce.create(name, flat) as reduce:
        for array in (np.array([None, 1]), np.zeros(2, [("a", "f4"), ("b", "O")])):
            calls = [partial(call, array) for call in (reduce.broadcast, reduce.stack, reduce.all_gather)]
            for call in (*calls, partial(reduce.broadcast, [array]), partial(reduce.stack, [array])):
                assert "references" in raised_everywhere(WORLD, UnsupportedDtypeError, call)


@pytest.mark.parametrize("check", [True, False])
def test_named_errors_of_sparse(check: str, topology_of: Callable[..., allreduce.Topology]) -> None:
    """An error of one rank, also after a call that all ranks know: all ranks raise it."""
    last = MPI.COMM_WORLD.rank == SIZE - 1

    def bring(reduce: AllReduce, indices: Any = (1, 0), width: int = 3, rows: Any = 5, **options: Any) -> str | None:
        index, values = np.array(indices), np.ones((2, width), options.pop("dtype", "float32"))
        return reduce.sparse(index, values, rows, **options) and None

    with allreduce.create("ring", topology_of(None if check else 1)) as reduce:
        bring(reduce)
        for indices, kind, text in (
            ((1, 5), OptionError, "1 of 2 indices are out of range for a table of 5 rows (the first is 5)"),
            ((-1, 5), OptionError, "2 of 2 indices are out of range for a table of 5 rows (the first is -1)"),
            ((0.0, 1.0), NotAnArrayError, "not one of shape (2,) and dtype float64"),
            ((0, 1, 2), NotAnArrayError, "one row for each of the 3 indices; their shape is (2, 3)"),
        ):
            assert text in raised_everywhere(WORLD, kind, lambda: bring(reduce, indices if last else (1, 0)))  # noqa: B023
        raised_everywhere(WORLD, NotAnArrayError, lambda: reduce.sparse([1], np.ones(1), 5))
        raised_everywhere(WORLD, UnsupportedOpError, lambda: bring(reduce, op="max"))
        raised_everywhere(WORLD, OptionError, lambda: bring(reduce, rows=-1))
        raised_everywhere(WORLD, UnsupportedDtypeError, lambda: bring(reduce, dtype="complex64"))
        others = ({"width": 4}, {"rows": 6}, {"op": "sum"}, {"dtype": "float64"}) if SIZE > 1 else ()
        for other in others:
            raised_everywhere(WORLD, DisagreementError, lambda: bring(reduce, **(other if last else {})))  # type: ignore[arg-type]  # noqa: B023
        if others:
            raised_everywhere(WORLD, DisagreementError, lambda: bring(reduce) if last else reduce.stack(1))  # type: ignore[func-returns-value]
        bring(reduce)
