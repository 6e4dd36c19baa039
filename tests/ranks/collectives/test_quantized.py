"""Sums that are sent as int8: the same bits on all ranks, and errors that the next call sends."""

import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Part, Quantized, errors
from allreduce.algorithms.compressed import quantized
from tests.ranks.collectives.lossy import residual, same_bits
from tests.ranks.counting import Counting
from tests.ranks.together import raised

JOBS = "openmpi 1 2 3"

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
several = pytest.mark.skipif(size == 1, reason="one rank sends nothing")
ROUGHLY = 0.02  # of the largest magnitude: what one call may be off


def gradient(step: int, length: int, dtype: str = "float32", of: int = rank) -> np.ndarray:
    """Values of one rank, whose magnitudes differ between parts of the array."""
    rng = np.random.default_rng([step, of])
    return (rng.normal(size=length) * np.repeat([1, 1e-3, 30], -(-length // 3))[:length]).astype(dtype)


def mean(step: int, length: int, dtype: str = "float32") -> np.ndarray:
    return np.mean([gradient(step, length, dtype, of).astype(np.float64) for of in range(size)], axis=0)


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
            assert np.abs(array[rest] - mean(0, length)[rest]).max() < 2 * ROUGHLY * 150
            assert not residual(reduce, array)[vectors].any()
            same_bits(view)


@several
@pytest.mark.parametrize(("bad", "dtype"), [(np.inf, "float32"), (-np.inf, "float64"), (np.nan, "float32")])
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


@pytest.mark.skipif(size != 2, reason="counts what two ranks send")
def test_bytes(flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress="int8") as reduce:
        array = reduce.allocate(300_000)
        transfer: Any = reduce._algorithm._transfer  # type: ignore[attr-defined]
        transfer._comm = counting = Counting(transfer._comm)
        reduce(array)
        transfer._comm = counting._comm
        codes = array.size
        assert codes < counting.sent.total() <= codes * (1 + 4.1 / 256)


@several
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_call_allocates_nothing(dtype: str, flat: allreduce.Topology) -> None:
    with allreduce.create("ring", flat, compress="int8") as reduce:
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
        Quantized(block_size=4),
        Quantized(block_size=2**20),
        Quantized(block_size=True),
        Quantized(seed=-1),
    ):
        assert "compress=Quantized(...): " in raised(errors.OptionError, partial(make, compress=options))
    text = raised(errors.DisagreementError, partial(make, compress="int8" if rank else "float16"))
    assert "compress='float16'" in text, text
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


def test_one_rank_rounds_nothing() -> None:
    with allreduce.Topology(MPI.COMM_SELF) as alone, allreduce.create("ring", alone, compress="int8") as reduce:
        array = reduce.allocate(9000)
        array[:] = gradient(0, 9000)
        reduce(array)
        assert (array == gradient(0, 9000)).all()
        assert not reduce.state()
