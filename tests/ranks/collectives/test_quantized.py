"""Sums that are sent as int8 and float8: the same bits on all ranks, and errors that the next call sends."""

import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Part, Quantized, errors, kernels
from allreduce.algorithms.compressed import quantized
from allreduce.algorithms.compressed.quantized import SHORTEST
from allreduce.backend import AllReduce
from tests.ranks.counting import Counting
from tests.ranks.grid import shapes
from tests.ranks.together import raised

JOBS = "openmpi 1 2 3"

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(size == 1, reason="one rank sends nothing")
KINDS = ("int8", "float8")
ROUGHLY = {"int8": 0.02, "float8": 0.05}  # of the largest magnitude: what one call may be off
CASES = [
    ("ring", "float32", "mean"),
    ("ring", "float64", "sum"),
    ("shared", "float32", "sum"),
    ("native", "float32", "mean"),
    ("auto", "float32", "mean"),
    ("reduce_to_one", "float64", "mean"),
    ("hierarchical_copy", "float32", "mean"),
][: 7 if size <= 3 else 2]  # more ranks take long on few cores
# "ring" with both kinds, every other backend with one.
BOTH = [(*case, kind) for number, case in enumerate(CASES) for kind in (KINDS if number < 2 else [KINDS[number % 2]])]
NODES = {name: shape for name, shape in shapes(size).items() if name != "flat"}


def gradient(step: int, length: int, dtype: str = "float32", of: int = rank) -> np.ndarray:
    """Values of one rank, whose magnitudes differ between parts of the array."""
    rng = np.random.default_rng([step, of])
    return (rng.normal(size=length) * np.repeat([1, 1e-3, 30], -(-length // 3))[:length]).astype(dtype)


def mean(step: int, length: int, dtype: str = "float32") -> np.ndarray:
    return np.mean([gradient(step, length, dtype, of).astype(np.float64) for of in range(size)], axis=0)


def total(array: np.ndarray) -> np.ndarray:
    """Return the sum over all ranks in float64. Collective."""
    found = array.astype(np.float64)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, found)
    return found


def residual(reduce: AllReduce, like: np.ndarray) -> np.ndarray:
    """Return this rank's error feedback; zeros on a rank that has none."""
    (found,) = [array for name, array in reduce.state().items() if name.endswith("residual")] or [np.zeros_like(like)]
    return found


def same_bits(array: np.ndarray) -> None:
    assert len(set(MPI.COMM_WORLD.allgather(array.tobytes()))) == 1, "ranks have different bits"


def follow(reduce: AllReduce, kind: str, length: int, dtype: str, op: str) -> None:
    """Call several times: nothing of a gradient is lost; what is not in the results is in the ranks' errors."""
    array = reduce.allocate(length, dtype)
    results, gradients = np.zeros(length), np.zeros(length)
    for step in range(4):
        array[:] = gradient(step, length, dtype)
        reduce(array, op)
        same_bits(array)
        results += array.astype(np.float64) * (size if op == "mean" else 1)
        gradients += size * mean(step, length, dtype)
        left = total(residual(reduce, array))
        np.testing.assert_allclose(results + left, gradients, rtol=1e-4, atol=1e-4 * size)
        assert np.abs(results - gradients).max() < 3 * ROUGHLY[kind] * size * 150, "the errors do not add up"


@several
@pytest.mark.parametrize(("name", "dtype", "op", "kind"), BOTH)
def test_nothing_is_lost(name: str, kind: str, dtype: str, op: str, flat: allreduce.Topology) -> None:
    for length in (SHORTEST, 200_003):
        with allreduce.create(name, flat, compress=kind) as reduce:
            assert reduce.lossy
            follow(reduce, kind, length, dtype, op)


@pytest.mark.skipif(not NODES, reason="needs ranks for several nodes")
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", ["hierarchical_copy", "auto", "ring"][: 3 if size <= 3 else 1])
def test_between_nodes(name: str, nodes: str, topology_of: Any) -> None:
    """Also where nodes have different numbers of ranks; then the leaders have all of the errors."""
    kind = KINDS[(nodes == "uneven") ^ (name == "auto")]
    with allreduce.create(name, topology_of(NODES[nodes]), compress=kind) as reduce:
        assert reduce.lossy
        follow(reduce, kind, 100_003, "float32", "mean")
        flags = np.full(SHORTEST, 1 + 2.0**-20 + rank)
        reduce(flags, "max", lossless=True)
        assert (flags == 1 + 2.0**-20 + size - 1).all()


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [8, 100, 32 * 1024])
def test_blocks_of_any_size(kind: str, block_size: int, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress=Quantized(kind, block_size)) as reduce:
        follow(reduce, kind, 130_001, "float32", "mean")


@several
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_without_feedback(kind: str, flat: allreduce.Topology) -> None:
    """Foreign arrays and trees of arrays, and allocated ones if the option says so."""
    with allreduce.create("ring", flat, compress=kind) as reduce:
        array = gradient(0, 9000).reshape(100, 90)
        other = gradient(1, 60_000, "float64")
        reduce({"one": [array], "other": other})
        same_bits(array)
        same_bits(other)
        assert np.abs(array.reshape(-1) - mean(0, 9000)).max() < ROUGHLY[kind] * 150
        assert np.abs(other - mean(1, 60_000)).max() < ROUGHLY[kind] * 150
        foreign = gradient(2, 9000)
        reduce(foreign, "sum")
        same_bits(foreign)
    with allreduce.create("ring", flat, compress=Quantized(kind, error_feedback=False)) as reduce:
        array = reduce.allocate(9000)
        for step in (0, 1):
            array[:] = gradient(step, 9000)
            reduce(array)
            assert np.abs(array - mean(step, 9000)).max() < ROUGHLY[kind] * 150
        assert not any(name.endswith("residual") for name in reduce.state())


@several
@pytest.mark.parametrize("kind", KINDS)
def test_buckets(kind: str, flat: allreduce.Topology) -> None:
    """A slice of an allocated array has its own errors; the others keep theirs."""
    with allreduce.create("ring", flat, compress=kind) as reduce:
        array = reduce.allocate(50_000)
        array[:] = gradient(0, 50_000)
        reduce(array[10_000:30_000])
        left = residual(reduce, array)
        assert left[10_000:30_000].any()
        assert not left[:10_000].any()
        assert not left[30_000:].any()
        reduce(array[30_000:])
        assert (residual(reduce, array)[10_000:30_000] == left[10_000:30_000]).all()


@several
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_go_uncompressed(kind: str, flat: allreduce.Topology) -> None:
    """Also where they are large beside their neighbours, and where a bucket begins inside of one."""
    parts = [Part("a.weight", 0, (100, 200)), Part("a.bias", 20_000, (100,)), Part("b.weight", 20_100, (300, 100))]
    parts += [Part("b.bias", 50_100, (300,)), Part("long", 50_400, (quantized.LONGEST_VECTOR + 1,))]
    length = parts[-1].stop
    vectors = np.r_[20_000:20_100, 50_100:50_400]
    with allreduce.create("ring", flat, compress=kind) as reduce:
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
            assert np.abs(array[rest] - mean(0, length)[rest]).max() < 2 * ROUGHLY[kind] * 150
            assert not residual(reduce, array)[vectors].any()
            same_bits(view)


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_phases(kind: str, dtype: str, flat: allreduce.Topology) -> None:
    """A reduce_scatter alone rounds once: the owner's slice is not rounded again."""
    with allreduce.create("ring", flat, compress=kind) as reduce:
        array = reduce.allocate(90_001, dtype)
        results, gradients = np.zeros(90_001), np.zeros(90_001)
        for step in range(3):
            array[:] = gradient(step, 90_001, dtype)
            mine = reduce.reduce_scatter(array)
            assert mine.base is not None
            assert not residual(reduce, array)[reduce.owned(array.size)].any()
            reduce.all_gather(array)
            same_bits(array)
            results += size * array.astype(np.float64)
            gradients += size * mean(step, 90_001, dtype)
            np.testing.assert_allclose(results + total(residual(reduce, array)), gradients, rtol=1e-4, atol=1e-3)


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bad", "dtype"), [(np.inf, "float32"), (-np.inf, "float64"), (np.nan, "float32")])
def test_infinities_and_nans(kind: str, bad: float, dtype: str, flat: allreduce.Topology) -> None:
    """One rank's infinity is no number on all ranks; the next call has none of it."""
    with allreduce.create("ring", flat, compress=kind) as reduce, np.errstate(all="raise"):
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


def trained(reduce: AllReduce, array: np.ndarray, steps: range) -> list[bytes]:
    """Return the results of calls, in which the first half of an array is reduced more often than the other."""
    found = []
    for step in steps:
        array[:] = gradient(step, array.size)
        reduce(array[:10_000])
        if step % 2:
            reduce(array[10_000:])
        found.append(array[: 20_000 if step % 2 else 10_000].tobytes())
    return found


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [None, *NODES.values()])
def test_state(kind: str, nodes: Any, topology_of: Any) -> None:
    """A run that is resumed with the state has the bits of one that went on; without the state it has not."""
    make = partial(allreduce.create, "hierarchical_copy", topology_of(nodes), compress=Quantized(kind, seed=3))
    with make() as reduce:
        whole = trained(reduce, reduce.allocate(20_000), range(6))
    with make() as reduce:
        array = reduce.allocate(20_000)
        assert trained(reduce, array, range(3)) == whole[:3]
        state = reduce.state()
        reduce.reset()
        assert not reduce.state()
        assert trained(reduce, array, range(6)) == whole
    with make() as reduce:
        array = reduce.allocate(20_000)
        reduce.load_state(state)
        assert trained(reduce, array, range(3, 6)) == whole[3:]
        reduce.reset()
        assert trained(reduce, array, range(3, 6)) != whole[3:]
    with make() as reduce:
        held = reduce.allocate(10)
        if state:
            text = raised(errors.OptionError, lambda: reduce.load_state(state))
            assert "which is not of the arrays of this backend: 0, float32 of length 10" in text, text
        reduce(held)


@pytest.mark.skipif(not NODES, reason="needs ranks for several nodes")
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("length", [SHORTEST - 1, SHORTEST, 100_003])
def test_errors_of_other_ranks_and_nodes(nodes: str, length: int, topology_of: Any) -> None:
    """A job with other nodes has divided its errors anew: each rank sends errors of elements that it does not own."""
    with allreduce.create("hierarchical_copy", topology_of(NODES[nodes]), compress="int8") as reduce:
        array = reduce.allocate(length)
        loaded = gradient(9, length)
        reduce.load_state({"0/residual": loaded})
        assert (residual(reduce, array) == loaded).all()
        array[:] = rank
        reduce(array, "max")
        assert (array == size - 1).all()
        given, sent = total(loaded), np.zeros(length)
        for step in range(2):
            array[:] = gradient(step, length)
            reduce(array)
            same_bits(array)
            given, sent = given + mean(step, length) * size, sent + array.astype(float) * size
        np.testing.assert_allclose(sent + total(residual(reduce, array)), given, rtol=1e-4, atol=1e-2)
        if length < SHORTEST:
            assert not residual(reduce, array).any()


@pytest.mark.skipif(not NODES, reason="needs ranks for several nodes")
@pytest.mark.parametrize("name", ["auto", "hierarchical_copy"])
def test_jobs_with_one_node_and_several_load_each_other_s_state(
    name: str, flat: allreduce.Topology, topology_of: Any
) -> None:
    make = partial(allreduce.create, name, compress="int8")
    with make(topology=topology_of(NODES[next(iter(NODES))])) as one, make(topology=flat) as other:
        first, second = one.allocate(20_000), other.allocate(20_000)
        second[:] = gradient(0, second.size)
        other(second)
        one.load_state(other.state())
        assert (residual(one, first) == residual(other, second)).all()
        other.reset()
        other.load_state(one.state())
        assert (residual(one, first) == residual(other, second)).all()
        assert total(residual(one, first)).any()


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


@pytest.mark.skipif(size != 2, reason="counts what two ranks send")
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(kind: str, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress=kind) as reduce:
        array = reduce.allocate(300_000)
        transfer: Any = reduce._algorithm._transfer  # type: ignore[attr-defined]
        transfer._comm = counting = Counting(transfer._comm)
        reduce(array)
        transfer._comm = counting._comm
        codes = array.size
        assert codes < counting.sent.total() <= codes * (1 + 4.1 / 256)


@several
@pytest.mark.skipif(kernels.status() != "C", reason="NumPy's functions for 8 bits allocate")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_call_allocates_nothing(kind: str, dtype: str, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress=kind) as reduce:
        array = reduce.allocate(600_000, dtype)
        reduce(array)
        tracemalloc.start()
        try:
            reduce(array)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < array.nbytes / 30, f"{peak} bytes"


@several
def test_bad_input(flat: allreduce.Topology) -> None:
    make = partial(allreduce.create, "ring", flat)
    assert "did you mean 'int8'" in raised(errors.OptionError, partial(make, compress="int4"))
    for options in (
        Quantized("int4"),
        Quantized(block_size=4),
        Quantized(block_size=2**20),
        Quantized(block_size=True),
        Quantized(seed=-1),
    ):
        assert "compress=Quantized(...): " in raised(errors.OptionError, partial(make, compress=options))
    text = raised(errors.DisagreementError, partial(make, compress="int8" if rank else "float8"))
    assert "compress='float8'" in text, text
    text = raised(errors.DisagreementError, partial(make, compress=Quantized(seed=rank)))
    assert "seed=1" in text, text
    assert "does not sum" in raised(errors.OptionError, partial(allreduce.create, "adasum", flat, compress="int8"))
    with make(compress="int8") as reduce:
        raised(errors.DisagreementError, lambda: reduce(np.ones(9000 + (rank == 0), "float32")))
        raised(errors.DisagreementError, lambda: reduce(np.ones(9000, "float32" if rank else "float64")))
        raised(errors.UnsupportedOpError, lambda: reduce(np.ones(9000, "int32"), "mean"))
        assert reduce.config is not None
        again = allreduce.create(reduce.config.name, flat, **reduce.config.options)
    assert again.lossy
    again.close()
    raised(errors.ClosedError, lambda: again(np.ones(9000)))


def test_one_rank_rounds_nothing() -> None:
    with allreduce.Topology(MPI.COMM_SELF) as alone, allreduce.create("ring", alone, compress="int8") as reduce:
        array = reduce.allocate(9000)
        array[:] = gradient(0, 9000)
        reduce(array)
        assert (array == gradient(0, 9000)).all()
        assert not reduce.state()
