"""bound = reduce.bind(array, op): the sums of a call, its errors, and its place in the order of calls."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 1 2 3, mpich 2"

SIZE = MPI.COMM_WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


def test_kinds_that_are_not_there(flat: allreduce.Topology) -> None:
    with allreduce.create("native", flat) as reduce:
        for kind in ("reduce_scatter", "broadcast", "all_to_all"):
            raised_everywhere(flat.world, errors.OptionError, lambda kind=kind: reduce.bind(np.ones(3), "sum", kind))  # type: ignore[misc]
        reduce.bind(np.ones(3), kind="all_gather")()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_failed_call_keeps_its_array(flat: allreduce.Topology, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI may still write there when the program has dropped the array and the bound call."""
    kept: list[object] = []
    monkeypatch.setattr("allreduce.call.executor.free_later", kept.append)

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    with allreduce.create("native", flat) as reduce:
        monkeypatch.setattr(reduce._algorithm, "work", lambda *_: allreduce.Work(fail))
        array = np.ones(3)
        bound = reduce.bind(array, op)
        with pytest.raises(ValueError, match="on purpose") if SIZE > 1 else nullcontext():
            bound()
        monkeypatch.undo()
    address = array.__array_interface__["data"][0]
    assert SIZE == 1 or address in {np.asarray(each).__array_interface__["data"][0] for each in _buffers(kept)}


def _buffers(kept: object) -> list[object]:
    """The arrays and memoryviews in nested tuples and lists."""
    if isinstance(kept, list | tuple):
        return [found for each in kept for found in _buffers(each)]
    return [kept] if isinstance(kept, np.ndarray | memoryview) else []


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
            text = raised_everywhere(flat.world, errors.OptionError, call)
            assert text.startswith(f"{name!r} has no reduce_scatter; use a backend with two phases")
        reduce(np.ones(3), "adasum" if name == "adasum" else "mean")


def test_bad_arguments_are_refused_when_it_is_bound(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat) as reduce:
        for error, array, op in (
            (errors.NotAnArrayError, [1.0], "sum"),
            (errors.NotContiguousError, np.ones(10)[::2], "sum"),
            (errors.UnsupportedOpError, np.ones(3), "median"),
            (errors.UnsupportedDtypeError, np.ones(3, "complex64"), "sum"),
        ):
            raised_everywhere(flat.world, error, lambda array=array, op=op: reduce.bind(array, op))  # type: ignore[misc]


def test_another_shape_later_changes_nothing(flat: allreduce.Topology) -> None:
    """The function reduces the memory that it was bound to."""
    with allreduce.create("ring", flat) as reduce:
        array = np.ones((2, 3))
        bound = reduce.bind(array, "sum")
        array.shape = (6,)
        bound()
        assert (array == SIZE).all()


@several
def test_ranks_that_differ(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat) as reduce:
        odd = reduce.rank == SIZE - 1
        text = raised_everywhere(flat.world, errors.DisagreementError, reduce.bind(np.ones(3 + odd), "sum"))
        assert f"rank {SIZE - 1}: all_reduce: length 4" in text
        one, other, array = np.ones(3), np.ones(4), np.ones(3)
        bound, second = reduce.bind(one, "sum"), reduce.bind(other, "sum")
        for _ in range(2):
            raised_everywhere(flat.world, errors.DisagreementError, lambda: (second if odd else bound)())
            raised_everywhere(flat.world, errors.DisagreementError, lambda: reduce(one, "max") if odd else bound())
        assert (one == 1).all()
        assert (other == 1).all()
        bound()
        assert (one == SIZE).all()
        if odd:  # a call of the same array is the same call
            reduce(array, "sum")
        else:
            reduce.bind(array, "sum")()
        assert (array == SIZE).all()


def test_after_close(flat: allreduce.Topology) -> None:
    reduce = allreduce.create("auto", flat)
    bound = reduce.bind(np.ones(3), "sum")
    reduce.close()
    with pytest.raises(errors.ClosedError):
        bound()
    with pytest.raises(errors.ClosedError):
        reduce.bind(np.ones(3), "sum")


def test_threads(flat: allreduce.Topology) -> None:
    """The function may be called in another thread than the one that bound it, by one thread at a time."""
    with allreduce.create("ring", flat) as reduce:
        array = np.ones(3)
        bound = reduce.bind(array, "sum")
        thread = threading.Thread(target=bound)
        thread.start()
        thread.join()
        bound()
        assert (array == SIZE**2).all()


class Inside(allreduce.Algorithm):
    """Calls a function in the middle of a call."""

    def reduce(self, buffer: np.ndarray, op: object) -> None:
        during[0]()


during: list[Callable[[], object]] = []


@several
def test_a_call_inside_of_a_call(flat: allreduce.Topology) -> None:
    found: list[BaseException] = []

    def call() -> None:
        try:
            reduce(np.ones(3), "sum")
        except errors.OptionError as error:
            found.append(error)

    with allreduce.create(Inside, flat) as reduce:
        during[:] = [call]
        reduce(np.ones(3), "sum")
        assert "while another thread of this rank is in" in str(found[0])
