"""Sums of floats whose bits depend on nothing but the terms: not on their order, nor on how they are divided.

The terms of a sum are arrays of one length. They are cut into blocks of up to BLOCK elements, of which `edges` has the
first elements, and behind them the length. For each block, the
largest exponent of all terms decides a quantum, a power of two, that all terms share:

    |term| < 2^e for all elements of the block in all terms        (e: the block's exponent)
    quantum = 2^t, t = max(e - (bits - ceil(log2 count)), least)   (count: the number of terms; least: see below)

Each element of each term is rounded once to a multiple of the quantum: to an integer. The sum of all integers has less
than `bits` bits, so integers are summed without error and without overflow, in any order and grouping. The sum, or the
sum divided by `count`, is rounded once to the result.

float32 and the 16-bit floats: bits = 52; float64 holds the integers, because it holds all integers up to 2^53, and its
sums are faster than conversions to int64. float64: bits = 62, in int64. `least` is the exponent of the dtype's smallest
subnormal: terms are multiples of it, so nothing is rounded where the quantum reaches it.

Error of a sum of n terms: at most n * 2^(t-1), and then one rounding. In a block whose largest element is about 2^e,
n * 2^(t-1) is about n * n * 2^(e-53): with 16 terms of float32, 2^-45 of the block's largest element. So a sum has the
error of one rounding unless it is 2^20 times smaller than the largest element in its block; an ordinary sum of float32
has n - 1 roundings, of its largest partial sum. Elements that are tiny beside their block's largest lose bits.

Infinities and NaN give the results of IEEE 754: infinity, or NaN if a NaN or infinities of both signs meet; the other
elements of such a block are summed as if these were zeros. A sum beyond the dtype's range is infinite. Sums of zeros,
whatever their signs, are +0. NaN has one bit pattern. A subnormal mean of float64 may be rounded twice.

J. Demmel, H. D. Nguyen: Parallel reproducible summation, IEEE Transactions on Computers 64(7), 2015. They take
exponents from a fixed grid and keep several bins; here the ranks agree on an exponent first, so one bin is enough.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allreduce import kernels
from allreduce.arrays import dtypes

BLOCK = 256  # elements that share an exponent, unless a part of the model ends before
MOST_TERMS = kernels.MOST_TERMS  # beyond, the quantum would be too coarse for float32


class Format(NamedTuple):
    """How elements of a dtype are read, and their sums are held."""

    wide: np.dtype  # the dtype in which elements are read
    not_finite: int  # the exponent bits of infinities and NaN
    bias: int  # an element with the exponent bits b is below 2^(b - bias)
    least: int  # exponent of the smallest subnormal
    exponents: np.dtype  # for a block's exponent bits
    carrier: np.dtype  # for integers
    bits: int  # of sums


_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
SINGLE = Format(_FLOATS[0], 0xFF, 126, -149, np.dtype(np.uint8), _FLOATS[1], 52)
DOUBLE = Format(_FLOATS[1], 0x7FF, 1022, -1074, np.dtype(np.int32), np.dtype(np.int64), 62)
FORMATS = {_FLOATS[0]: SINGLE, dtypes.FLOAT16: SINGLE, dtypes.BFLOAT16: SINGLE, _FLOATS[1]: DOUBLE}  # by dtype


@lru_cache(maxsize=64)  # made once for equal arguments
def block_edges(length: int, starts: Sequence[int] = (0,)) -> np.ndarray:
    """Return the edges of the blocks of an array of `length` elements: int64, which nobody changes.

    starts: where parts of the model begin, ascending, the first at 0; blocks begin anew there. So a slice of whole
        parts has the same blocks as these parts have in the whole array.
    """
    parts = zip(starts, [*starts[1:], length], strict=True)
    return np.concatenate([*(np.arange(start, stop, BLOCK) for start, stop in parts), [length]]).astype(np.int64)


def exponents(terms: Sequence[np.ndarray], edges: np.ndarray, form: Format) -> np.ndarray:
    """Return the largest exponent bits in each block of these terms: (blocks,) form.exponents.

    terms: contiguous, aligned 1-D arrays of edges[-1] elements; there may be none. The other functions take the maximum
        over all ranks.
    """
    found = np.zeros(edges.size - 1, form.exponents)
    if len(terms):
        kernels.require(kernels.exponents(terms, edges, found))
    return found


def without_marks(terms: Sequence[np.ndarray], length: int, form: Format) -> tuple[list[np.ndarray], np.ndarray]:
    """Return copies of the terms with zeros for infinities and NaN, and the sum of these: (length,) form.wide.

    In the sum over all ranks, an element that is not 0 is the result: an infinity or NaN.
    """
    clean, marks = [], np.zeros(length, form.wide)
    for term in terms:
        finite = np.isfinite(term)
        clean.append(np.where(finite, term, term.dtype.type(0)))
        marks += np.where(finite, term.dtype.type(0), term)
    return clean, marks


def write_marks(marks: np.ndarray, out: np.ndarray, part: slice) -> None:
    """Write the infinities and NaN to the elements `part` of `out`. marks: the sum over all ranks."""
    marked = part.start + np.flatnonzero(marks[part])
    out[marked] = np.where(np.isnan(marks[marked]), np.nan, marks[marked])  # one bit pattern for NaN


def add(
    terms: Sequence[np.ndarray],
    largest: np.ndarray,
    count: int,
    edges: np.ndarray,
    form: Format,
    out: np.ndarray,
) -> None:
    """Round each term, which must be finite, to integers, and write the sums of the integers to `out`.

    largest: the exponent bits of each block, of all terms of all ranks. count: the number of all terms. out: 1-D,
    form.carrier.
    """
    if not len(terms):
        out[:] = 0
        return
    powers = -quantum(largest, count, form)
    half = powers // 2 * (powers >= form.bias)  # two factors, because 2^1024 is no float64
    factors, rests = np.ldexp(1.0, powers - half), np.ldexp(1.0, half)
    kernels.require(kernels.add_integers(terms, edges, factors, rests, out))


def finish(
    integers: np.ndarray,
    largest: np.ndarray,
    count: int,
    mean: bool,
    edges: np.ndarray,
    form: Format,
    out: np.ndarray,
    part: slice,
) -> None:
    """Round the sums of all terms, or their means, to the elements `part` of `out`.

    integers: the integers that `add` has written, summed over all ranks; complete in `part`.
    """
    if part.start >= part.stop:
        return
    first, last = np.searchsorted(edges, [part.start, part.stop - 1], "right") - 1
    inside = np.clip(edges[first : last + 2], part.start, part.stop)
    factors, divisor = np.ldexp(1.0, quantum(largest[first : last + 1], count, form)), count if mean else 1
    kernels.require(kernels.finish(integers, inside, factors, divisor, out))


def sum_blocks(
    terms: Sequence[np.ndarray], count: int, mean: bool, edges: np.ndarray, outs: Sequence[np.ndarray]
) -> bool:
    """Write the sum or mean of all terms of all ranks to the blocks `edges` of `outs`: the other functions in one pass
    over the memory. Returns False if there is no kernel for it."""
    bits = FORMATS[terms[0].dtype].bits - (count - 1).bit_length()
    return kernels.sum_fixed(terms, outs, edges, bits, count if mean else 1)


def quantum(largest: np.ndarray, count: int, form: Format) -> np.ndarray:
    """Return the exponent t of each block's quantum; the module's docstring has the formula."""
    bits = form.bits - (count - 1).bit_length()
    return np.maximum(largest.astype(np.int32) - (form.bias + bits), form.least)
