"""float32 and float64 that are sent with 16 bits, with every backend and in training."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import errors
from allreduce.arrays.compression import Compression, PowerSGD
from allreduce.arrays.parts import Part
from tests.ranks.counting import Counting
from tests.ranks.together import raised
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


@several
def test_bad_input(flat: allreduce.Topology) -> None:
    topology = flat
    text = raised(errors.OptionError, partial(allreduce.create, "ring", topology, compress="bfloat61"))
    assert "did you mean 'bfloat16'?" in text, text

    class Foreign(Compression):
        pass

    text = raised(errors.OptionError, partial(allreduce.create, "ring", topology, compress=Foreign()))
    assert "allreduce.Half" in text, text
    assert "sums no 16-bit" in raised(
        errors.OptionError, partial(allreduce.create, "native", topology, compress="float16")
    )
    text = raised(
        errors.DisagreementError,
        partial(allreduce.create, "ring", topology, compress="float16" if rank else "bfloat16"),
    )
    assert "compress='bfloat16'" in text, text
    with allreduce.create("ring", topology, compress="float16") as reduce:
        network = NumpyNetwork([4, 3])
        refused = partial(MirroredTrainer, network, reduce, compress="float16")
        assert "exists already" in raised(errors.OptionError, refused)
        large = np.array([1e6, 6e4, 2**-26], "float32")
        reduce(large, "sum")
        assert large.tolist() == [np.inf, np.inf, 0.0]  # no float16: the first itself, the second's sum, the last
        again = allreduce.create(reduce.config.name, topology, **reduce.config.options)
        assert again.lossy
    refused = partial(MirroredTrainer, NumpyNetwork([4, 3]), "ring", topology, compress="half")
    raised(errors.OptionError, refused)
    again.close()


def sent(reduce: Any, dtype: str) -> int:
    """Return the bytes that one call sends; the first call, which allocates, is not counted."""
    reduce(np.ones(LENGTH, dtype), "sum")
    transfer = reduce._algorithm.lossless._transfer
    transfer._comm = counting = Counting(transfer._comm)
    reduce(np.ones(LENGTH, dtype), "sum")
    transfer._comm = counting._comm
    return counting.sent.total()


@pytest.mark.skipif(size != 2, reason="counts what two ranks send")
def test_bytes_across_nodes() -> None:
    with (
        allreduce.Topology(ranks_per_node=1) as nodes,
        allreduce.create("ring", nodes) as plain,
        allreduce.create("ring", nodes, compress="bfloat16") as reduce,
    ):
        assert 2 * sent(reduce, "float32") == sent(plain, "float32")
        assert 4 * sent(reduce, "float64") == sent(plain, "float64")


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
@pytest.mark.parametrize("compress", ["int8", "powersgd:1"])
@pytest.mark.parametrize("name", ["ring", "shared"])
def test_ranks_that_pass_different_arrays(name: str, compress: Any, flat: allreduce.Topology) -> None:
    """The state that is kept for an array decides which messages are sent, so ranks may not mix arrays."""
    with allreduce.create(name, flat, compress=compress) as reduce:
        one, other = reduce.allocate(LENGTH), reduce.allocate(LENGTH)
        raised(errors.DisagreementError, lambda: reduce(other if rank else one, "sum"))
        raised(errors.DisagreementError, lambda: reduce(one[rank > 0 : LENGTH - (rank == 0)], "sum"))
        one[:] = rank
        reduce(one, "sum")
        assert np.abs(one - sum(range(size))).max() < 0.1


@several
@pytest.mark.parametrize("compress", ["int8", PowerSGD(start_powerSGD_iter=0)])
@pytest.mark.parametrize(("name", "nodes"), [("ring", None), ("auto", 1)])
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


@pytest.mark.parametrize("compress", ["int8", "powersgd:2"])
def test_every_array_keeps_its_state(compress: str, flat: allreduce.Topology) -> None:
    """Also the last one, before scratch memory is allocated in the first call."""
    with allreduce.create("shared", flat, compress=compress) as reduce:
        arrays = [reduce.allocate(4096), reduce.allocate(4096)]
        for array in arrays:
            reduce.describe(array, [allreduce.Part("w", 0, (64, 64))])
            array[:] = np.linspace(-1, 1, 4096) * (flat.rank + 1)
            reduce(array, "sum")
        numbers = {name.partition("/")[0] for name in reduce.state()} - {"place"}
        assert len(numbers) == (2 if flat.size > 1 else 0)
        reduce.load_state(reduce.state())
