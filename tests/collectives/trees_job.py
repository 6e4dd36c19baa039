"""A job of test_trees.py: lists, tuples and dicts of arrays in the backends' calls."""

import os
import tempfile
from collections import namedtuple
from functools import partial

import numpy as np

import allreduce
from allreduce import errors
from allreduce.backend import AllReduce
from allreduce.tracing.trace import Trace
from allreduce.wrappers.background import Background
from allreduce.wrappers.traced import Traced

Pair = namedtuple("Pair", "x y")
topology = allreduce.Topology()
rank, size = topology.rank, topology.size


def tree() -> dict:
    """Values depend on rank and index; one array is not contiguous, one has no dimension, one has no element."""
    whole = np.arange(24, dtype="float32").reshape(4, 6) + rank
    back = {"b": [np.full(3, rank, "float64"), None], "a": (whole, whole[:, ::2].copy(order="F")[::-1])}
    back["pair"] = Pair(np.array(rank + 1, "float32"), np.zeros((0, 2), "int32"))
    return dict(reversed(back.items())) if rank % 2 else back  # the order in which keys came is no matter


def check(reduce: AllReduce) -> None:
    for _ in range(2):
        given = tree()
        arrays = given["a"][0], given["b"]
        assert "int32" in raised(errors.UnsupportedOpError, partial(reduce, given, "mean"))
        reduce(given, "sum")
        ranks = sum(range(size))
        assert given["a"][0] is arrays[0]
        assert given["b"] is arrays[1]
        np.testing.assert_array_equal(given["a"][0], np.arange(24).reshape(4, 6) * size + ranks)
        np.testing.assert_array_equal(given["a"][1], (np.arange(24).reshape(4, 6) * size + ranks)[::-1, ::2])
        np.testing.assert_array_equal(given["b"][0], np.full(3, ranks))
        assert given["pair"].x == ranks + size
    held = {key: id(value) for key, value in reduce.packed.items()}
    given = tree()
    reduce.broadcast(given, root=size - 1)
    np.testing.assert_array_equal(given["a"][0], np.arange(24).reshape(4, 6) + size - 1)
    assert given["b"][0].tolist() == [size - 1] * 3
    found = reduce.stack(tree())
    assert list(found) == list(tree())
    assert isinstance(found["pair"], Pair)
    assert found["pair"].x.tolist() == list(range(1, size + 1))
    assert found["a"][1].shape == (size, 4, 3)
    assert found["pair"].y.shape == (size, 0, 2)
    assert found["b"][1] is None
    reduce([], "sum")
    reduce({"nothing": ()}, "sum")
    assert {key: id(value) for key, value in reduce.packed.items()} == held  # memory of the first call


def raised(kind: type[Exception], call: object) -> str:
    """Every rank raises `kind`."""
    try:
        call()  # type: ignore[operator]
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} on rank {rank}")


def check_errors(reduce: AllReduce) -> None:
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


for name in ("auto", "ring", "hierarchical_copy"):
    with allreduce.create(name, topology) as reduce:
        check(reduce)
        if size > 1:
            check_errors(reduce)
        with tempfile.TemporaryDirectory() as folder, Trace(os.path.join(folder, "trace.json"), topology) as trace:
            check(Traced(topology, inner=reduce, trace=trace))
            assert trace.calls
        if name == "ring":
            with Background(topology, inner=reduce) as background:
                check(background)
topology.close()
print(f"rank {rank} is done")
