"""Exact sums of products of rows, against fractions: roundings, the bound of the error, special values, any order."""

import math
from fractions import Fraction

import numpy as np
import pytest

from allreduce.arrays import products
from allreduce.arrays.fixed_point import write_special
from allreduce.arrays.products import MOST_ROWS, Pair
from allreduce.arrays.workspace import Workspace
from tests.collectives.test_fixed_point import rounded, spread


def total(groups: list[list[Pair]], count: int, divisor: int = 1) -> np.ndarray:
    """The sum of the rows of several ranks, a list of pairs for each rank."""
    length = sum(left.shape[1] * right.shape[1] for left, right in groups[0])
    largest = np.max([products.exponents(pairs) for pairs in groups], axis=0)
    found = [products.special(pairs, largest, length) for pairs in groups]
    sums = np.zeros(length)
    for pairs in groups:
        own = np.full(length, 7.0)
        products.multiply(pairs, largest, count, Workspace(), own)
        sums += own
    result = np.full(length, 7, np.float32)
    products.finish(sums, divisor, result, slice(0, length))
    specials = [each for each in found if each is not None]
    if specials:
        assert len(specials) == len(groups)
        write_special(result, *(np.max(specials, axis=0) > 0))
    return result


def fractions(array: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(float(value)) for value in row] for row in array]


def reference(pair: Pair, count: int) -> list[Fraction]:
    """What the module's docstring says, in fractions; of finite rows."""
    bits = (53 - math.ceil(math.log2(count))) // 2
    exact, quantized = [fractions(array) for array in pair], []
    for rows in exact:
        columns = []
        for column in zip(*rows, strict=True):
            largest = max(map(abs, column))
            e = math.frexp(float(largest))[1] if largest >= Fraction(2) ** -126 else -126
            unit = Fraction(2) ** max(e - bits, -149)
            columns.append([round(value / unit) * unit for value in column])
        quantized.append(columns)
    results = []
    for index, left in enumerate(quantized[0]):
        for other, right in enumerate(quantized[1]):
            own, wanted = [row[index] for row in exact[0]], [row[other] for row in exact[1]]
            found = sum((a * b for a, b in zip(left, right, strict=True)), Fraction(0))
            error = abs(found - sum((a * b for a, b in zip(own, wanted, strict=True)), Fraction(0)))
            bound = Fraction(2) ** (1 - bits) * max(map(abs, own)) * max(map(abs, wanted)) * len(own)
            tiny = Fraction(2) ** -126
            if max(map(abs, own)) > tiny and max(map(abs, wanted)) > tiny:
                assert error <= bound * (1 + Fraction(2) ** -bits)
            results.append(rounded(found, 24, -149))
    return results


@pytest.mark.parametrize("count", [1, 2, 7, 128, MOST_ROWS])
@pytest.mark.parametrize(("low", "high"), [(-155, -140), (-128, -60), (-30, 4), (-1, 1)])
def test_every_element_is_what_fractions_give(count: int, low: int, high: int) -> None:
    random = np.random.default_rng(count)
    rows = min(count, 9)
    pair = spread(random, (rows, 5), "float32", low, high), spread(random, (rows, 3), "float32", 80, 120)
    found = [Fraction(float(value)) for value in total([[pair]], count)]
    assert found == reference(pair, count)


@pytest.mark.parametrize("count", [1, 3, 128, 600, MOST_ROWS])
def test_the_largest_sums_are_exact(count: int) -> None:
    """All rows are the largest that round to 2^bits quanta, but for an odd quantum in one of them."""
    top = np.nextafter(np.float32(2), np.float32(1))
    left, right = np.full((count, 2), top), np.full((count, 2), -top)
    bits = products.bits_of(count)
    left[-1, 1] = right[-1, 1] = 1 + np.ldexp(np.float32(1), 1 - bits)  # an odd number of quanta
    largest = products.exponents([(left, right)])
    out = np.empty(4)
    products.multiply([(left, right)], largest, count, Workspace(), out)
    unit = Fraction(2) ** (1 - bits)
    whole = [[round(Fraction(float(value)) / unit) * unit for value in column] for column in (left[-1], right[-1])]
    first = round(Fraction(float(top)) / unit) * unit
    for index, value in enumerate(out):
        a, b = whole[0][index // 2], whole[1][index % 2]
        assert Fraction(float(value)) == -((count - 1) * first * first) + a * b


def pairs_of(random: np.random.Generator, rows: int) -> list[Pair]:
    shapes = [(7, 33), (300, 5), (1, 40)]
    return [tuple(spread(random, (rows, size), "float32", -20, 3) for size in shape) for shape in shapes]  # type: ignore[misc]


def part_of(pairs: list[Pair], rows: list[int]) -> list[Pair]:
    return [(left[rows], right[rows]) for left, right in pairs]


def test_bits_do_not_depend_on_order_or_ranks() -> None:
    random = np.random.default_rng(2)
    pairs = pairs_of(random, 90)
    numbers = list(range(90))
    expected = total([pairs], 128)
    for ranks in (1, 2, 3, 5, 90):
        random.shuffle(numbers)
        groups = [part_of(pairs, numbers[rank::ranks]) for rank in range(ranks)]
        assert total([*groups, part_of(pairs, [])], 128).tobytes() == expected.tobytes(), ranks
    plain = np.concatenate([(left.T.astype("f8") @ right).reshape(-1) for left, right in pairs])
    np.testing.assert_allclose(expected, plain, rtol=1e-5, atol=90 * 2**-22 * 64)
    mean = total([pairs], 128, divisor=128)
    assert mean.tobytes() == (expected / np.float32(128)).tobytes()


def test_errors_are_like_those_of_float32() -> None:
    """Of a layer's gradients for 128 rows with ReLU activations, and errors of very different sizes."""
    random = np.random.default_rng(3)
    left = np.maximum(random.normal(size=(128, 64)), 0).astype("float32")
    right = (random.normal(size=(128, 64)) * random.uniform(1e-4, 1, (128, 1)) / 128).astype("float32")
    exact = left.T.astype("longdouble") @ right.astype("longdouble")
    ours, plain = total([[(left, right)]], 128).reshape(64, 64), left.T @ right
    assert np.abs(ours - exact).mean() < 3 * np.abs(plain - exact).mean()
    assert np.abs(ours - exact).max() < 3 * np.abs(plain - exact).max()


def test_infinities_and_nan() -> None:
    """As a sum of products, one row after the other, in float64."""
    random = np.random.default_rng(4)
    kinds = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 1e-45], np.float32)
    for rare in (0.005, 0.02):
        pairs: list[Pair] = []
        for shape in ((40, 30), (1, 30), (6, 4)):
            both = [random.normal(size=(20, size)).astype("float32") for size in shape]
            for array in both:
                chosen = random.random(array.shape) < rare
                array[chosen] = random.choice(kinds, int(chosen.sum()))
            pairs.append((both[0], both[1]))
        found = total([part_of(pairs, list(range(rank, 20, 3))) for rank in range(3)], 20)
        start = 0
        with np.errstate(all="ignore"):
            for left, right in pairs:
                expected = (left.astype("f8")[:, :, None] * right.astype("f8")[:, None]).sum(axis=0).reshape(-1)
                own = found[start : start + expected.size]
                bad = ~np.isfinite(expected)
                assert bad.any()
                assert not bad.all()
                np.testing.assert_array_equal(own[bad], expected[bad].astype("float32"))
                beyond = np.abs(expected) > np.finfo("float32").max
                assert np.isfinite(own[~bad & ~beyond]).all()
                start += expected.size
        assert len({value.tobytes() for value in found[np.isnan(found)]}) == 1


def test_sums_of_zeros_are_positive() -> None:
    left, right = np.array([[-0.0, 0.0, 2.0]], "float32"), np.array([[-1.0, -0.0]], "float32")
    assert total([[(left, right)]], 1).tobytes() == np.array([0, 0, 0, 0, -2, 0], "float32").tobytes()
