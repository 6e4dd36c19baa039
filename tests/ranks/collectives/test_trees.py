"""Lists, tuples and dicts of arrays in the backends' calls."""

import threading
import time
from collections import namedtuple
from collections.abc import Callable, Generator
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.backend import AllReduce
from tests.ranks.together import raised

JOBS = "openmpi 1 2 3, mpich 2"

Pair = namedtuple("Pair", "x y")
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture(scope="module", params=["auto", "ring", "hierarchical_copy"])
def reduce(request: pytest.FixtureRequest, topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    with allreduce.create(request.param, topology_of(None)) as made:
        yield made


def tree() -> dict:
    """Values depend on rank and index; one array is not contiguous, one has no dimension, one has no element."""
    whole = np.arange(24, dtype="float32").reshape(4, 6) + rank
    back = {"b": [np.full(3, rank, "float64"), None], "a": (whole, whole[:, ::2].copy(order="F")[::-1])}
    back["pair"] = Pair(np.array(rank + 1, "float32"), np.zeros((0, 2), "int32"))
    return dict(reversed(back.items())) if rank % 2 else back  # the order in which keys came is no matter


@pytest.mark.parametrize("kind", ["stack", "reduced"])
def test_a_refused_thread_leaves_the_other_one_its_result(reduce: AllReduce, kind: str) -> None:
    """Rank 0 waits for the others in one thread; a second thread calls with a tree of the same layout."""
    if size == 1:
        pytest.skip("one rank waits for nobody")
    call = partial(reduce.stack) if kind == "stack" else partial(reduce.reduced, op="sum")
    own = {"a": np.full(3, rank + 1.0)}
    call(own)
    results = []
    if rank == 0:
        thread = threading.Thread(target=lambda: results.append(call(own)))
        thread.start()
        while reduce.executor.wait.call is None:
            time.sleep(0.01)
        with pytest.raises(errors.OptionError, match="while another thread"):
            call({"a": np.full(3, 100.0)})
        for other in range(1, size):
            MPI.COMM_WORLD.send(None, other)
        thread.join()
    else:
        MPI.COMM_WORLD.recv(source=0)
        results.append(call(own))
    expected = np.arange(1.0, size + 1)
    found = results[0]["a"]
    assert (found == (expected[:, None] if kind == "stack" else expected.sum())).all()


def test_the_tree_and_its_memory_stay(reduce: AllReduce) -> None:
    given = tree()
    arrays = given["a"][0], given["b"]
    assert "int32" in raised(errors.UnsupportedOpError, partial(reduce, given, "mean"))
    reduce(given, "sum")
    assert given["a"][0] is arrays[0]
    assert given["b"] is arrays[1]
    held = {key: id(value) for key, value in reduce._packed.items()}
    reduce(tree(), "sum")
    found = reduce.stack(tree())
    assert isinstance(found["pair"], Pair)
    assert found["b"][1] is None
    reduce([], "sum")
    reduce({"nothing": ()}, "sum")
    assert {key: id(value) for key, value in reduce._packed.items()} == held  # memory of the first call


@pytest.mark.skipif(size == 1, reason="one rank can't disagree")
def test_errors(reduce: AllReduce) -> None:
    shape = (3, 2) if rank == 0 else (2, 3)  # as many elements
    text = raised(errors.DisagreementError, lambda: reduce({"w": np.ones(shape)}, "sum"))
    assert "rank 0: a tree {'w': *} of float64[3, 2]" in text, text
    reduce([np.ones(shape[0] + shape[1])], "sum")
    name = "w" if rank else "v"
    assert "{'v': *}" in raised(errors.DisagreementError, lambda: reduce({name: np.ones(2)}, "sum"))
    known = [np.ones(2), np.ones(3)]
    reduce(known, "sum")
    given = known if rank else [np.ones(2), "text"]
    raised(errors.NotAnArrayError if rank == 0 else errors.AllReduceError, lambda: reduce(given, "sum"))
    raised(errors.DisagreementError, lambda: reduce(known if rank else [np.ones(20)], "sum"))
    read_only = np.ones(2)
    read_only.flags.writeable = False
    raised(errors.NotAnArrayError, lambda: reduce([read_only], "sum"))
    raised(errors.UnsupportedDtypeError, lambda: reduce([np.ones(2, "complex64")], "sum"))
    raised(errors.UnsupportedOpError, lambda: reduce([np.ones(2)], "median"))
    reduce(known, "sum")
