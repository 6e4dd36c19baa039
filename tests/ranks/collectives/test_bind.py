"""bound = reduce.bind(array, op): the sums of a call, its errors, and its place in the order of calls."""

import threading
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from tests.ranks.together import raised_everywhere

JOBS = "openmpi 1 2 3, mpich 2"

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size
several = pytest.mark.skipif(SIZE == 1, reason="one rank can't disagree")


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
        for kind in ("broadcast", "all_to_all"):
            raised_everywhere(flat.world, errors.OptionError, lambda kind=kind: reduce.bind(np.ones(3), "sum", kind))  # type: ignore[misc]


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
