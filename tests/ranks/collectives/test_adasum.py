"""The backend "adasum" against the same tree of pairs in NumPy."""

from collections.abc import Callable, Generator
from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.backend import AllReduce
from tests.ranks.together import raised
from trainers import MirroredTrainer, NumpyNetwork

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0, "float64": 0.0}  # once, half a unit


@pytest.fixture(scope="module")
def reduce(topology_of: Callable[..., allreduce.Topology]) -> Generator[AllReduce]:
    with allreduce.create("adasum", topology_of(None)) as made:
        yield made


def vector(number: int, length: int, dtype: object) -> np.ndarray:
    """Return the vector of rank `number`; ranks have different directions and lengths."""
    return (np.random.default_rng(number).normal(size=length) * (number + 1) + 0.5).astype(dtype)


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    def part(vector: np.ndarray) -> np.ndarray:
        square = vector @ vector
        return vector if square == 0 else (1 - a @ b / (2 * square)) * vector

    return part(a) + part(b)


def tree(vectors: list[np.ndarray]) -> np.ndarray:
    """Combine the surplus ranks first, then pairs of neighbours, pairs of pairs, ..."""
    vectors = [each.astype(np.float64) for each in vectors]
    power = 1 << (len(vectors).bit_length() - 1)
    level = [pair(vectors[n], vectors[n + power]) if n + power < len(vectors) else vectors[n] for n in range(power)]
    while len(level) > 1:
        level = [pair(*both) for both in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def expect(found: np.ndarray, wanted: np.ndarray, dtype: str, what: str) -> None:
    slack = 1e-14 if dtype == "float64" else 1e-6
    limits = ROUNDED[dtype] * 1.01 * np.abs(wanted) + slack * np.abs(wanted).max(initial=0)
    assert (np.abs(found.astype(np.float64) - wanted) <= limits).all(), (what, found[:4], wanted[:4])
    everyone = MPI.COMM_WORLD.allgather(found.tobytes())
    assert all(one == other for one, other in pairwise(everyone)), f"{what}: ranks have different bits"


def test_values(reduce: AllReduce) -> None:
    for name in ROUNDED:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for length in (0, 1, size - 1, 5, 1000, 300_001):  # parts of none, one and several segments
            wanted = tree([vector(number, length, dtype) for number in range(size)])
            for array in (np.empty(length, dtype), reduce.allocate(length, name)):
                array[:] = vector(rank, length, dtype)
                reduce(array, "adasum")
                expect(array, wanted, name, f"{name}, length {length}")
    table = vector(rank, 12, "float32").reshape(3, 4)
    reduce(table, "adasum")
    expect(table.reshape(-1), tree([vector(number, 12, "float32") for number in range(size)]), "float32", "2-D")


def test_properties(reduce: AllReduce) -> None:
    same = np.array([3.0, -4.0])
    reduce(same, "adasum")
    np.testing.assert_allclose(same, [3, -4], rtol=1e-15)  # equal ones are averaged
    axis = np.zeros(size)
    axis[rank] = rank + 1
    reduce(axis, "adasum")
    np.testing.assert_array_equal(axis, range(1, size + 1))  # orthogonal ones added
    alone = np.full(7, 2.0 if rank == size - 1 else 0.0, "float32")
    reduce(alone, "adasum")
    assert alone.tolist() == [2.0] * 7  # zeros change nothing
    nothing = np.zeros(7)
    reduce(nothing, "adasum")
    assert not nothing.any()
    spoilt = np.full(7, np.nan if rank == 0 else 1.0)
    reduce(spoilt, "adasum")
    assert np.isnan(spoilt).all()


def test_layers(reduce: AllReduce) -> None:
    """Each array of a tree is combined on its own, with any dtype, contiguous or not."""
    wide = np.zeros((5, 8), "float32")
    given = {"w": wide[:, ::2], "b": [vector(rank + 9, 3, "float32"), vector(rank, 3, "float64")]}
    given["w"][...] = vector(rank, 20, "float32").reshape(5, 4)
    reduce(given, "adasum")
    found = [given["w"].reshape(-1), *given["b"]]
    brought = (0, 20, "float32"), (9, 3, "float32"), (0, 3, "float64")
    for array, (first, length, dtype) in zip(found, brought, strict=True):
        expect(array, tree([vector(first + number, length, dtype) for number in range(size)]), dtype, "a layer")
    counts = {"n": np.full(2, rank)}
    reduce.broadcast(counts, root=size - 1)  # what moves may be integers
    assert counts["n"].tolist() == [size - 1] * 2


def test_bad_input(reduce: AllReduce) -> None:
    topology = reduce.topology
    array = vector(rank, 4, "float64")
    for op in ("sum", "mean", "average", "max", None, ["adasum"]):
        assert "because it makes no sums" in raised(errors.UnsupportedOpError, partial(reduce, array, op))
    assert "floating" in raised(errors.UnsupportedOpError, partial(reduce, np.ones(4, "int32"), "adasum"))
    assert "floating" in raised(errors.UnsupportedOpError, partial(reduce, [np.ones(4), np.ones(4, bool)], "adasum"))
    raised(errors.UnsupportedOpError, partial(reduce.sparse, np.arange(4), array, 9, "sum"))
    raised(errors.UnsupportedOpError, partial(reduce.sparse, np.arange(4), array, 9, "adasum"))
    assert (array == vector(rank, 4, "float64")).all()
    if size > 1:
        raised(errors.DisagreementError, partial(reduce, np.ones(40 + (rank == 0)), "adasum"))
        reduce(np.ones(3), "adasum")
        reduce(np.ones(2), "adasum")
        text = raised(errors.DisagreementError, partial(reduce, np.ones(2 + (rank == 0)), "adasum"))  # both are known
        assert 'op "adasum"' in text, text
        raised(errors.DisagreementError, partial(allreduce.create, "ring" if rank else "adasum", topology))
    for name in ("auto", "ring", "native"):
        with allreduce.create(name, topology) as other:
            assert "only the backend" in raised(errors.UnsupportedOpError, partial(other, array, "adasum"))
    for part in ("node", "cross"):
        composed = partial(allreduce.create, "hierarchical_copy", topology, **{part: "adasum"})
        assert "does not sum" in raised(errors.OptionError, composed)
    assert reduce.name == "adasum"
    assert "adasum" not in (*allreduce.NAMES, *allreduce.available(topology))
    reduce(array, "adasum")


def test_in_trainers(reduce: AllReduce) -> None:
    """Trainers refuse it when they are created, in any wrapper; PyTorch's optimizers: test_sparse_gradients.py."""
    topology = reduce.topology
    with allreduce.create("adasum", topology, compress="bfloat16") as halved:
        by_name = {"allreduce": "adasum", "topology": topology, "compress": "float16"}
        for given in ({"allreduce": reduce}, {"allreduce": halved}, by_name):
            for update in ("replicated", "sharded"):
                make = partial(MirroredTrainer, NumpyNetwork([4, 2]), update=update, **given)
                assert "does not sum gradients" in raised(errors.OptionError, make)
    reduce(vector(rank, 4, "float64"), "adasum")  # it is still open
