"""Sums in fixed point, against fractions: every rounding, the special values, and that nothing but the terms counts."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from allreduce import kernels
from allreduce.arrays import fixed_point
from allreduce.arrays.fixed_point import BLOCK, block_edges
from allreduce.kernels import FORMATS, Format

pytestmark = pytest.mark.skipif(kernels.status() != "C", reason=f"arrays are computed by {kernels.status()}")

DIGITS = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}
LARGEST = {"float16": 65504, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": 1.79e308}
KINDS = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DIGITS}


def total(groups: list[list[np.ndarray]], edges: np.ndarray, mean: bool = False) -> np.ndarray:
    """The sum of the terms of several ranks, a group for each rank."""
    dtype, length, count = groups[0][0].dtype, int(edges[-1]), sum(map(len, groups))
    form, whole = FORMATS[dtype], slice(0, length)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        split = [fixed_point.without_marks(terms, length, form) for terms in groups]
        marks = np.sum([marks for _, marks in split], axis=0)
    clean = [terms for terms, _ in split]
    largest = np.max([fixed_point.exponents(terms, edges, form) for terms in clean], axis=0)
    sums = np.zeros(length, form.carrier)
    for terms in clean:
        own = np.full(length, 7, form.carrier)
        fixed_point.add(terms, largest, count, edges, form, own)
        sums += own
    result = np.zeros(length, dtype)
    fixed_point.finish(sums, largest, count, mean, edges, form, result, whole)
    fixed_point.write_marks(marks, result, whole)
    # C gives the same bits in one pass, in place of a term, some blocks after the others
    terms = [term.copy() for terms in groups for term in terms]
    middle = edges.size // 2
    for blocks in (edges[: middle + 1], edges[middle:]):
        fixed_point.sum_blocks(terms, count, mean, blocks, terms[:2])
    for term in terms[:2]:
        assert term.tobytes() == result.tobytes()
    return result


def rounded(value: Fraction, digits: int, least: int) -> Fraction:
    """`value` to the nearest float with so many digits, ties to even; 2^least is the smallest subnormal."""
    if not value:
        return value
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator))
    exponent += 1 if abs(value) >= Fraction(2) ** (exponent + 1) else -1 if abs(value) < Fraction(2) ** exponent else 0
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    return round(value / unit) * unit


def reference(terms: list[np.ndarray], edges: np.ndarray, mean: bool, count: int) -> dict[int, Fraction]:
    """The sums by the rule of the module's docstring, in fractions, by the index of every third element. The terms are
    finite."""
    digits, least = DIGITS[terms[0].dtype.name]
    form: Format = FORMATS[terms[0].dtype]
    results: dict[int, Fraction] = {}
    for at, end in itertools.pairwise(edges.tolist()):
        largest = Fraction(max(float(np.abs(term[at:end].astype(float)).max()) for term in terms))
        smallest = Fraction(2) ** (1 - form.bias)  # of the normal numbers
        e = 1 - form.bias if largest < smallest else math.frexp(float(largest))[1]
        unit = Fraction(2) ** max(e - (form.bits - math.ceil(math.log2(count))), form.least)
        for index in range(at, end, 3):
            values = [Fraction(float(term[index])) for term in terms]
            exact = sum((round(value / unit) * unit for value in values), Fraction(0))
            assert abs(exact - sum(values)) <= len(terms) * unit / 2  # the bound of the docstring
            results[index] = rounded(exact / count if mean else exact, digits, least)
    return results


def spread(random: np.random.Generator, shape: tuple[int, ...], name: str, low: int, high: int) -> np.ndarray:
    """Random floats with exponents from low to high, some of them zero."""
    values = np.ldexp(random.uniform(-1, 1, shape), random.integers(low, high, shape)) * (random.random(shape) > 0.1)
    return values.astype(KINDS[name])


RANGES = {
    "float16": [(-24, -10), (-3, 8)],
    "bfloat16": [(-133, -120), (-10, 10), (80, 120)],
    "float32": [(-160, -140), (-128, -90), (-20, 4), (-3, 3), (90, 120)],
    "float64": [(-1080, -1060), (-1030, -990), (-990, -900), (-60, 4), (-3, 3), (900, 1000)],
}


@pytest.mark.parametrize("name", DIGITS)
@pytest.mark.parametrize("mean", [False, True])
def test_every_element_is_what_fractions_give(name: str, mean: bool) -> None:
    random = np.random.default_rng(1)
    edges = block_edges(BLOCK + 60, (0, 5, 6))
    for low, high in RANGES[name]:
        for count in (1, 3, 16, 50):
            terms = list(spread(random, (count, int(edges[-1])), name, low, high))
            found = [Fraction(float(value)) for value in total([terms], edges, mean)]
            expected = reference(terms, edges, mean, count)
            subnormal = name == "float64" and low < -950 and mean  # these may be rounded twice
            for index, wanted in expected.items():
                got = found[index]
                assert got == wanted or (subnormal and abs(got - wanted) <= Fraction(2) ** -1074)


@pytest.mark.parametrize("name", DIGITS)
def test_infinities_leave_other_elements_of_their_block_exact(name: str) -> None:
    random = np.random.default_rng(4)
    edges = block_edges(BLOCK + 10)
    terms = list(spread(random, (5, int(edges[-1])), name, -6, 3))
    clean = [term.copy() for term in terms]
    for row, at in ((0, 3), (2, 3), (4, 200), (1, BLOCK + 2)):
        terms[row][at], clean[row][at] = -np.inf if row else np.inf, 0
    found, expected = total([terms[:2], terms[2:]], edges), total([clean], edges)
    wrong = np.isin(np.arange(int(edges[-1])), [3, 200, BLOCK + 2])
    assert np.isnan(found[3])
    assert (found[[200, BLOCK + 2]] == -np.inf).all()
    assert np.array_equal(found[~wrong], expected[~wrong])


@pytest.mark.parametrize("name", DIGITS)
def test_sums_beyond_the_range_are_infinite(name: str) -> None:
    terms = [np.array([LARGEST[name], -LARGEST[name], LARGEST[name]]).astype(KINDS[name]) for _ in range(4)]
    assert (total([terms], block_edges(3)) == np.array([np.inf, -np.inf, np.inf])).all()
    assert (total([terms], block_edges(3), True) == terms[0]).all()  # the sum is held exactly, only the mean is rounded


def test_quotients_are_rounded_once() -> None:
    random = np.random.default_rng(8)
    for count in (1, 2, 3, 5, 7, 100, 127, 128, 1000, 2**20 + 1, kernels.MOST_TERMS):
        edges = [0, 1, 2**62, 2**62 - 1, min(2**53 * count + 1, 2**62), min(2**54 * count + 1, 2**62), 2**53 + 1]
        edges += [-edge for edge in edges]
        integers = np.concatenate([edges, *(random.integers(-(2**bits), 2**bits, 60) for bits in range(1, 63))])
        found, blocks = np.empty(integers.size), block_edges(integers.size)
        kernels.finish(integers, blocks, np.ones(blocks.size - 1), count, found)
        for integer, value in zip(integers.tolist(), found.tolist(), strict=True):
            assert value == integer / count, (integer, count)  # Python divides integers with one rounding
