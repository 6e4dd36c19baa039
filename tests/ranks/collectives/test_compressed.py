"""Sums that are sent with fewer bits: the same bits on all ranks, and errors of int8 that the next call sends."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.algorithms.compressed import quantized
from allreduce.arrays.compression import Compression, PowerSGD, Quantized
from allreduce.arrays.parts import Part
from tests.ranks.collectives.lossy import residual, same_bits
from tests.ranks.together import raised, raised_everywhere
from trainers import MirroredTrainer
from trainers.replicas.numpy.network import NumpyNetwork

JOBS = "openmpi 1 2 3"

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(size == 1, reason="one rank sends nothing")
LENGTH = 12_000
SHORT = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def values(number: int, dtype: str, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(number).normal(size=length).astype(dtype)


@pytest.mark.every_pair
@pytest.mark.skipif(size < 3, reason="needs a node of several ranks, and another one")
@pytest.mark.parametrize("per_node", [2, (1, size - 1)])
@pytest.mark.parametrize("name", ["hierarchical_copy", "auto"])
def test_only_messages_between_nodes_are_compressed(name: str, per_node: Any, topology_of: Any) -> None:
    """The sum of a node is rounded once, not each rank's value; all ranks get the same bits, and a mean of all."""
    with allreduce.create(name, topology_of(per_node), compress="bfloat16") as reduce:
        assert reduce.compression.sent(np.dtype("float32")) == SHORT["bfloat16"]
        array = reduce.allocate(100_000)
        array[:] = values(rank, "float32", 100_000)
        reduce(array, "mean")
        right = np.mean([values(number, "float32", 100_000) for number in range(size)], axis=0, dtype=np.float64)
        assert np.abs(array - right).max() < 2**-5
        assert (array != right.astype("float32")).any()
        assert len(set(MPI.COMM_WORLD.allgather(array.tobytes()))) == 1
        flag = np.full(3, 1 + 2.0**-20)
        reduce(flag, "max", lossless=True)
        assert (flag == 1 + 2.0**-20).all()
        for short, large in zip(SHORT.values(), (2048, 256), strict=True):  # rounded once, from the float32 sum
            losses = np.full(3, 1 if rank else large, short)
            reduce(losses, "sum", lossless=True)
            assert (losses == np.float32(large + size - 1).astype(short)).all(), short
        _, rows = reduce.sparse(np.arange(1 << 10), np.full((1 << 10, 256), 1 + 2.0**-20, "float32"), 1 << 10, "mean")
        assert (rows == np.float32(1 + 2.0**-20)).all()
        assert reduce.state() == {}


class Foreign(Compression):
    pass


REFUSED: list[tuple[str, Any, str]] = [
    ("ring", "bfloat61", "did you mean 'bfloat16'?"),
    ("ring", "int4", "did you mean 'int8'"),
    ("ring", "powersdg:4", "did you mean 'powersgd:4'?"),
    ("ring", Foreign(), "allreduce.Half"),
    ("native", "float16", "sums no 16-bit"),
    ("adasum", "int8", "does not sum"),
    *(("ring", Quantized(size), "compress=Quantized(...): ") for size in (4, 2**20, True)),
    ("ring", Quantized(seed=-1), "compress=Quantized(...): "),
    *(
        ("ring", each, "compress=PowerSGD(...): ")
        for each in ("powersgd:0", PowerSGD(0), PowerSGD(2, min_compression_rate=-1))
    ),
]
DIFFERENT: list[tuple[Any, Any]] = [
    ("bfloat16", "float16"),
    ("float16", "int8"),
    (Quantized(seed=1), Quantized(seed=2)),
    ("powersgd:1", "powersgd:2"),
]


@several
def test_what_is_refused_when_it_is_made(flat: allreduce.Topology) -> None:
    for name, compress, words in REFUSED:
        make = partial(allreduce.create, name, flat, compress=compress)
        assert words in raised_everywhere(MPI.COMM_WORLD, errors.OptionError, make)
    for compresses in DIFFERENT:
        make = partial(allreduce.create, "ring", flat, compress=compresses[rank > 0])
        text = raised_everywhere(MPI.COMM_WORLD, errors.DisagreementError, make)
        assert all(repr(each) in text for each in compresses)
    for compress in ("float16", "int8"):
        with allreduce.create("ring", flat, compress=compress) as reduce:
            refused = partial(MirroredTrainer, NumpyNetwork([4, 3]), reduce, compress="float16")
            assert "exists already" in raised(errors.OptionError, refused)
            again = allreduce.create(reduce.config.name, flat, **reduce.config.options)
            assert again.lossy
            raised(errors.DisagreementError, lambda: again(np.ones(9000 + (rank == 0), "float32")))  # noqa: B023
            raised(errors.DisagreementError, lambda: again(np.ones(9000, "float32" if rank else "float64")))  # noqa: B023
            raised(errors.UnsupportedOpError, lambda: again(np.ones(9000, "int32"), "mean"))  # noqa: B023
            again.close()


@several
def test_values_that_float16_does_not_have(flat: allreduce.Topology) -> None:
    """The first itself, the second's sum, the last."""
    with allreduce.create("ring", flat, compress="float16") as reduce:
        array = np.array([1e6, 6e4, 2**-26], "float32")
        reduce(array, "sum")
        assert array.tolist() == [np.inf, np.inf, 0.0]


def one_step(topology: allreduce.Topology, **options: Any) -> float:
    """Return the loss of one step, as the trainer reports it."""
    x, y = values(9, "float32", 8 * 30).reshape(30, 8), np.arange(30) % 2
    with MirroredTrainer(NumpyNetwork([8, 2], seed=1), "ring", topology, **options) as trainer:
        return trainer.fit(x, y, epochs=1, batch_size=30, progress=False)[0].loss


@several
def test_the_loss_is_exact(flat: allreduce.Topology) -> None:
    assert abs(one_step(flat, compress="bfloat16") - one_step(flat)) < 1e-6


@several
@pytest.mark.parametrize("compress", ["int8", "powersgd:2"])
def test_a_tree_gets_nothing_of_an_earlier_one(compress: str, flat: allreduce.Topology) -> None:
    """Error feedback of gradients must not be added to other arrays that are packed into the same buffer."""
    with allreduce.create("ring", flat, compress=compress) as reduce:
        for _ in range(3):
            reduce({"gradients": values(rank, "float32").reshape(100, -1)}, "sum")
        other = [np.zeros(LENGTH, "float32")]
        reduce(other, "sum")
        assert not other[0].any()


@several
@pytest.mark.parametrize("compress", ["int8", PowerSGD(start_powerSGD_iter=0)])
@pytest.mark.parametrize(("name", "nodes"), [("ring", None), ("shared", None), ("auto", 1)])
def test_the_state_of_one_array(name: str, nodes: int | None, compress: Any, topology_of: Any) -> None:
    """Each array's own state goes to the equal array of another backend, in which it has another number."""
    length = 4 * LENGTH  # shorter ones are not compressed by auto

    def made() -> Any:
        reduce = allreduce.create(name, topology_of(nodes), compress=compress)
        arrays = [reduce.allocate(length) for _ in range(2)]
        for array in arrays:
            reduce.describe(array, [Part("weight", 0, (LENGTH, 4))])
        return reduce, arrays

    def sums(reduce: Any, arrays: Any) -> list[bytes]:
        for number, array in enumerate(arrays):
            array[:] = values(rank, "float32", length) * (number + 1)
            reduce(array, "sum")
        return [array.tobytes() for array in arrays]

    reduce, arrays = made()
    other, equal = made()
    with reduce, other:
        first = sums(reduce, arrays)
        held = [reduce.state(array) for array in arrays]
        assert {name.partition("/")[0] for name in reduce.state()} == {"0", "1", "place"}
        expected = sums(reduce, arrays)
        assert expected != first
        for state, array in zip(held, reversed(equal), strict=True):
            other.load_state(state, array)
        for state, array in zip(held, reversed(equal), strict=True):
            loaded = other.state(array)
            assert loaded.keys() == state.keys()
            assert all((loaded[key] == state[key]).all() for key in state)
        assert sums(other, equal[::-1]) == expected
        moved = {name: array + (name == "place") for name, array in held[0].items()}  # of another rank, or other nodes
        other.load_state(moved, equal[0])
        loaded = other.state(equal[0])
        assert loaded.keys() == {name for name in held[0] if not name.endswith("/residual")}
        reduce.reset(arrays[1])
        assert reduce.state(arrays[0])
        assert not reduce.state(arrays[1])
        everything = reduce.state()
        reduce.reset()
        assert not reduce.state()
        assert sums(reduce, arrays) == first
    with allreduce.create(name, topology_of(nodes), compress=compress) as another:
        held_array = another.allocate(10)
        text = raised(errors.OptionError, lambda: another.load_state(everything))
        assert "which is not of the arrays of this backend: 0, float32 of length 10" in text, text
        another(held_array)


def gradient(step: int, length: int, dtype: str = "float32", of: int = rank) -> np.ndarray:
    """Values of one rank, whose magnitudes differ between parts of the array."""
    rng = np.random.default_rng([step, of])
    return (rng.normal(size=length) * np.repeat([1, 1e-3, 30], -(-length // 3))[:length]).astype(dtype)


@several
def test_vectors_go_uncompressed(flat: allreduce.Topology) -> None:
    """Also where they are large beside their neighbours, and where a bucket begins inside of one."""
    parts = [Part("a.weight", 0, (100, 200)), Part("a.bias", 20_000, (100,)), Part("b.weight", 20_100, (300, 100))]
    parts += [Part("b.bias", 50_100, (300,)), Part("long", 50_400, (quantized.LONGEST_VECTOR + 1,))]
    length = parts[-1].stop
    vectors = np.r_[20_000:20_100, 50_100:50_400]
    with allreduce.create("ring", flat, compress="int8") as reduce:
        array = reduce.allocate(length)
        reduce.describe(array, parts)
        for view in (array, array[20_050:]):
            array[:] = gradient(0, length)
            array[vectors] = 1e9 * (1 + rank + np.arange(400))
            reduce(view)
            first = length - view.size
            reduced = vectors[vectors >= first]
            wanted = 1e9 * (1 + np.arange(size).mean() + np.arange(400))[vectors >= first]
            np.testing.assert_allclose(array[reduced], wanted, rtol=1e-6)
            rest = np.setdiff1d(np.arange(first, length), vectors)
            right = np.mean([gradient(0, length, of=of) for of in range(size)], axis=0)
            assert np.abs(array[rest] - right[rest]).max() < 6  # of magnitudes up to 150
            assert not residual(reduce, array)[vectors].any()
            same_bits(view)


BAD = [(np.inf, "float32"), (-np.inf, "float64"), (np.nan, "float32"), (3e38, "float32")]


@several
@pytest.mark.parametrize(("bad", "dtype"), BAD)
def test_infinities_and_nans(bad: float, dtype: str, flat: allreduce.Topology) -> None:
    """One rank's infinity is no number on all ranks; the next call has none of it."""
    with allreduce.create("ring", flat, compress="int8") as reduce, np.errstate(all="raise"):
        array = reduce.allocate(20_000, dtype)
        for place in (0, 7000, 19_999):
            array[:] = gradient(0, array.size, dtype)
            if rank == size - 1:
                array[place] = bad
            reduce(array)
            assert not np.isfinite(array[place])
            assert np.isfinite(array).sum() >= array.size - 2 * 256
            same_bits(array)
            assert np.isfinite(residual(reduce, array)).all()
        array[:] = gradient(0, array.size, dtype)
        reduce(array)
        assert np.isfinite(array).all()


@several
def test_int8_depends_on_seed_and_rank(flat: allreduce.Topology) -> None:
    results: dict[int, set[bytes]] = {}
    for seed in (0, 1, 0):
        with allreduce.create("ring", flat, compress=Quantized(seed=seed)) as reduce:
            array = reduce.allocate(20_000)
            array[:] = gradient(0, array.size, of=0)
            reduce(array)
            results.setdefault(seed, set()).add(array.tobytes())
            errors_of_ranks = residual(reduce, array)
            both = np.empty((size, array.size), array.dtype)
            MPI.COMM_WORLD.Allgather(errors_of_ranks, both)
            assert (both[0] != both[-1]).mean() > 0.5, "ranks with equal values round alike"
    assert len(results[0]) == 1
    assert results[0] != results[1]


@pytest.mark.parametrize("compress", ["bfloat16", "int8"])
def test_one_rank_rounds_nothing(compress: str) -> None:
    with allreduce.Topology(MPI.COMM_SELF) as alone, allreduce.create("ring", alone, compress=compress) as reduce:
        array = reduce.allocate(9000)
        array[:] = gradient(0, 9000)
        reduce(array)
        assert (array == gradient(0, 9000)).all()
        assert not reduce.state()
