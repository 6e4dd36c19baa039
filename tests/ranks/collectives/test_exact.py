"""exact=True: the bits of sums depend on nothing but the data, with every backend, division into nodes and slices."""

import itertools
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import Part, errors, kernels
from allreduce.arrays.fixed_point import BLOCK
from tests.ranks.collectives.lossy import same_bits
from tests.ranks.grid import numpy_dtype
from tests.ranks.together import raised_everywhere, usable

JOBS = "openmpi 1 2 3"

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
FLOATS = ("float16", "bfloat16", "float32", "float64")
several = pytest.mark.skipif(SIZE == 1, reason="one rank alone is its own sum")


def values(number: int, dtype: str, length: int, spread: int = 12) -> np.ndarray:
    """Term `number` of a sum; magnitudes differ by 2^spread, so that a plain sum depends on its order."""
    rng = np.random.default_rng([number, length])
    return np.ldexp(rng.uniform(-1, 1, length), rng.integers(-spread, 1, length)).astype(numpy_dtype(dtype))


TERMS = 12


def divided(terms: int, ranks: int, way: int) -> list[list[int]]:
    """Ways to divide numbered terms among ranks: in order, in turns, and all on the last rank."""
    numbers = list(range(terms))
    if way == 0:
        return [part.tolist() for part in np.array_split(numbers, ranks)]
    if way == 1:
        return [numbers[rank::ranks] for rank in range(ranks)]
    return [[] for _ in range(ranks - 1)] + [numbers[::-1]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_terms_have_the_same_bits_on_any_ranks(dtype: str, flat: allreduce.Topology) -> None:
    """Also on one rank: `expected` is what a topology of this rank alone gives."""
    length = 20_001
    for op in ("sum", "mean") if dtype == "float32" else ("mean",):
        with allreduce.Topology(MPI.COMM_SELF) as alone, allreduce.create("ring", alone, exact=True) as single:
            expected = np.empty(length, numpy_dtype(dtype))
            single.sum_terms([values(number, dtype, length) for number in range(TERMS)], expected, op, TERMS)
        for name in ("ring", "shared", "auto"):
            with usable(name, flat, exact=True) as reduce:
                out = reduce.allocate(length, dtype)
                for way in range(3):
                    mine = divided(TERMS, SIZE, way)[RANK]
                    terms = np.stack([values(number, dtype, length) for number in mine] or [out])[: len(mine)]
                    assert reduce.sum_terms(terms, out, op, TERMS) is out
                    assert same_bits(out) == expected.tobytes(), (name, way)
                    part = reduce.sum_terms(list(terms), out, op, TERMS, "reduce_scatter")
                    own = reduce.owned(length)
                    assert part.base is out or part.base is out.base
                    assert part.tobytes() == expected[own].tobytes(), (name, way)


@several
@pytest.mark.parametrize("name", ["shared", "ring", "auto"])
def test_buckets_of_described_parts_have_the_bits_of_the_whole(name: str, flat: allreduce.Topology) -> None:
    sizes = [3, 5 * BLOCK + 1, 1, BLOCK, 70_000, 12]
    ends = np.cumsum(sizes).tolist()
    parts = [
        Part(f"p{number}", end - size, (size,)) for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    length = ends[-1] + 4  # something follows the parameters
    with usable(name, flat, exact=True) as reduce:
        array = reduce.allocate(length)
        reduce.describe(array, parts)
        results, wide = [], values(RANK, "float32", length, spread=50)  # so wide that the blocks make a difference
        for cuts in ([0, length], [0, ends[0], ends[3], length], [0, ends[1], ends[1] + 1, ends[4], ends[5], length]):
            array[:] = wide
            for begin, end in itertools.pairwise(cuts):
                reduce(array[begin:end], "mean")
            results.append(same_bits(array))
        assert len(set(results)) == 1
        alone = wide[ends[0] : ends[1]].copy()
        reduce(alone, "mean")
        assert alone.tobytes() == array[ends[0] : ends[1]].tobytes()


@several
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["ring", "shared", "native"])
def test_special_values(name: str, dtype: str, flat: allreduce.Topology) -> None:
    first, last = RANK == 0, RANK == SIZE - 1
    with usable(name, flat, exact=True) as reduce:
        for length in (9, 40_000):
            array = np.zeros(length, numpy_dtype(dtype))
            array[:9] = [np.inf if first else 1, -np.inf if last else np.inf, np.nan if last else 1, -0.0, -np.inf,
                         0.0 if first else -0.0, 1 if first else 0, -np.inf if first else 2, 0.5]  # fmt: skip
            reduce(array, "sum")
            wanted = np.array([np.inf, np.nan, np.nan, 0, -np.inf, 0, 1, -np.inf, SIZE / 2], array.dtype)
            assert array[:9].tobytes() == wanted.tobytes()
            assert same_bits(array)
            assert not array[9:].any()
            for op, ends in (("max", [SIZE - 1, 0]), ("min", [0, 1 - SIZE])):
                array[:5] = [-0.0 if first else 0.0, -0.0, np.nan if last else 5, RANK, -RANK]
                reduce(array, op)
                assert array[:5].tobytes() == np.array([0, 0, np.nan, *ends], array.dtype).tobytes()


def test_ranks_without_the_c_library(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank lacks it, and all ranks are refused."""
    if RANK == SIZE - 1:
        monkeypatch.setattr(kernels, "status", lambda: "NumPy (a reason)")
    for given in ({"exact": True}, {"compress": "int8"}):
        for name in ("ring", "hierarchical_copy"):
            create = partial(allreduce.create, name, flat, **given)  # type: ignore[arg-type]
            text = raised_everywhere(WORLD, errors.UnavailableError, create)
            assert "needs the C library" in text
            assert "a reason" in text


def test_bad_input(flat: allreduce.Topology) -> None:
    create = partial(allreduce.create, "ring", flat)
    text = raised_everywhere(WORLD, errors.OptionError, partial(create, exact=True, compress="bfloat16"))
    assert "exclude each other" in text
    raised_everywhere(WORLD, errors.OptionError, partial(create, exact="yes"))
    text = raised_everywhere(WORLD, errors.OptionError, partial(allreduce.create, "adasum", flat, exact=True))
    assert "does not sum" in text
    with create(exact=True) as reduce:
        raised_everywhere(WORLD, errors.UnsupportedOpError, lambda: reduce(np.ones(3), "prod"))
        out, ones, sums = np.empty(4, np.float32), np.ones((2, 4), np.float32), reduce.sum_terms
        for kind, given in (
            (errors.OptionError, (ones, out, "sum", 2 * SIZE - 1)),
            (errors.OptionError, (ones, out, "sum", 0)),
            (errors.OptionError, (ones, out, "sum", True)),
            (errors.OptionError, (ones, out, "sum", 2 * SIZE, "broadcast")),
            (errors.UnsupportedOpError, (ones, out, "max", 8)),
            (errors.UnsupportedOpError, (ones.astype("i4"), out.astype("i4"), "sum", 9)),
            (errors.NotAnArrayError, (ones[:, :3], out, "sum", 2 * SIZE)),
            (errors.NotAnArrayError, ([[1.0] * 4], out, "sum", 2 * SIZE)),
            (errors.NotAnArrayError, (ones.astype("f8"), out, "sum", 2 * SIZE)),
        ):
            raised_everywhere(WORLD, kind, partial(sums, *given))  # type: ignore[arg-type]
        sums(ones, out, "mean", 2 * SIZE)
        assert out.tolist() == [1, 1, 1, 1]
        overlap = np.lib.stride_tricks.sliding_window_view(np.ones(5, np.float32), 4)
        unaligned = np.zeros(4 * 4 + 1, np.uint8)[1:].view(np.float32)
        unaligned[:] = 1
        for terms in (overlap, [unaligned, unaligned]):
            out[:] = 0
            sums(terms, out, "mean", 2 * SIZE)
            assert out.tolist() == [1, 1, 1, 1]
        again = allreduce.create(reduce.config.name, flat, **reduce.config.options)
        assert again.sums_terms
        again.close()


@several
def test_ranks_that_differ(flat: allreduce.Topology) -> None:
    text = raised_everywhere(WORLD, errors.DisagreementError, lambda: allreduce.create("ring", flat, exact=RANK == 0))
    assert "exact=True" in text
    ones, out = np.ones((1, 700), np.float32), np.empty(700, np.float32)
    refuse = partial(raised_everywhere, WORLD, errors.DisagreementError)
    for name in ("ring", "shared", "auto"):
        with usable(name, flat, exact=True) as reduce:
            refuse(partial(reduce.sum_terms, ones, out, "sum", 20 + RANK))
            array = reduce.allocate(3000)
            begin = 100 * (RANK == 0)
            refuse(partial(reduce, array[begin : begin + 700], "sum"))
            reduce.describe(array, [Part("a", 0, (5 + (RANK == 0),))])
            refuse(partial(reduce, array, "sum"))
            reduce.sum_terms(ones, out, "mean", SIZE)
            assert (out == 1).all()
