"""Sums of floats whose bits depend on nothing but the terms: not on their order, nor on how they are divided.

The terms are arrays of one length, cut into blocks of up to BLOCK elements; `edges` has the first element of each
block, and behind them the length. In a block the largest exponent e of all `count` terms decides a quantum that they
share:

    |term| < 2^e; quantum = 2^t, t = max(e - (bits - ceil(log2 count)), exponent of the dtype's smallest subnormal)

Each element is rounded once, to an integer times the quantum. The sum of all integers has less than `bits` bits, so it
is exact in any order; it, or it divided by `count`, is rounded once more. float32 and the 16-bit floats: bits = 52, in
float64, which is faster than int64; float64: bits = 62, in int64. The error of n terms is at most n * 2^(t - 1), and
one rounding: an element loses bits if it is 2^20 times smaller than the largest one in its block.

Infinities and NaN are summed as IEEE 754 says; NaN has one bit pattern, zero is +0. A subnormal mean of float64 may be
rounded twice. J. Demmel, H. D. Nguyen: Parallel reproducible summation, IEEE Transactions on Computers 64(7), 2015;
here the ranks agree on an exponent first, so one bin is enough.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from allreduce import kernels
from allreduce.kernels import FORMATS, Format

BLOCK = 256  # elements that share an exponent, unless a part of the model ends before


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
        kernels.exponents(terms, edges, found)
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
    kernels.add_integers(terms, edges, factors, rests, out)


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
    kernels.finish(integers, inside, factors, divisor, out)


def sum_blocks(
    terms: Sequence[np.ndarray], count: int, mean: bool, edges: np.ndarray, outs: Sequence[np.ndarray]
) -> None:
    """Write the sum or mean of all terms of all ranks to the blocks `edges` of `outs`: the other functions in one pass
    over the memory."""
    bits = FORMATS[terms[0].dtype].bits - (count - 1).bit_length()
    kernels.sum_fixed(terms, outs, edges, bits, count if mean else 1)


def quantum(largest: np.ndarray, count: int, form: Format) -> np.ndarray:
    """Return the exponent t of each block's quantum; the module's docstring has the formula."""
    bits = form.bits - (count - 1).bit_length()
    return np.maximum(largest.astype(np.int32) - (form.bias + bits), form.least)
