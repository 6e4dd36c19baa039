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

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allreduce import kernels
from allreduce.arrays import casts, dtypes

CACHED_BLOCKS = 256  # that NumPy works on at a time
BLOCK = 256  # elements that share an exponent, unless a part of the model ends before
MOST_TERMS = kernels.MOST_TERMS  # beyond, the quantum would be too coarse for float32


class Format(NamedTuple):
    """How elements of a dtype are read, and their sums are held."""

    wide: np.dtype  # the dtype in which elements are read
    word: np.dtype  # integers of the same size
    magnitude: int  # the bits of a word without the sign
    fraction: int  # bits of a word behind the exponent
    bias: int  # an element with the exponent bits b is below 2^(b - bias)
    least: int  # exponent of the smallest subnormal
    exponents: np.dtype  # for a block's exponent bits
    carrier: np.dtype  # for integers
    bits: int  # of sums

    @property
    def not_finite(self) -> int:
        """The exponent bits of infinities and NaN."""
        return self.magnitude >> self.fraction


_WORDS = np.dtype(np.int32), np.dtype(np.int64)
_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
SINGLE = Format(_FLOATS[0], _WORDS[0], 2**31 - 1, 23, 126, -149, np.dtype(np.uint8), _FLOATS[1], 52)
DOUBLE = Format(_FLOATS[1], _WORDS[1], 2**63 - 1, 52, 1022, -1074, np.dtype(np.int32), _WORDS[1], 62)
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

    terms: 1-D arrays of edges[-1] elements; there may be none. The other functions take the maximum over all ranks.
    """
    found = np.zeros(edges.size - 1, form.exponents)
    if not kernels.exponents(terms, edges, found):
        scratch = _scratch(edges, form.word)
        for blocks, span in _pieces(edges):
            starts, words = edges[blocks] - span.start, scratch[: span.stop - span.start]
            for term in terms:
                values = _wide(term[span], words.view(form.wide))
                np.bitwise_and(values.view(form.word), form.magnitude, out=words)
                largest = np.maximum.reduceat(words, starts) >> form.fraction
                np.maximum(found[blocks], largest, out=found[blocks], casting="unsafe")
    return found


class Special(NamedTuple):
    """The elements of blocks with infinities or NaN. positive, negative: which are infinite or NaN in a term."""

    blocks: np.ndarray  # numbers of the blocks
    elements: np.ndarray  # indices of all their elements
    exponents: np.ndarray  # of the blocks without infinities and NaN
    positive: np.ndarray
    negative: np.ndarray

    def packed(self) -> np.ndarray:
        """Return the array of which the ranks take the maximum."""
        return np.concatenate([self.exponents, self.positive, self.negative]).astype(self.exponents.dtype)

    def unpacked(self, packed: np.ndarray) -> "Special":
        """Return the same for all ranks. packed: the maximum of all ranks' `packed`."""
        ends = np.cumsum([self.blocks.size, self.elements.size])
        largest, positive, negative = np.split(packed, ends)
        return self._replace(exponents=largest, positive=positive > 0, negative=negative > 0)


def special(terms: Sequence[np.ndarray], largest: np.ndarray, edges: np.ndarray, form: Format) -> Special | None:
    """Return the Special of these terms, or None if all terms of all ranks are finite. largest: of all ranks."""
    chosen = largest == form.not_finite
    if not chosen.any():
        return None
    lengths = np.diff(edges)
    elements = np.flatnonzero(np.repeat(chosen, lengths))
    positive, negative = np.zeros((2, elements.size), bool)
    words = np.zeros(elements.size, form.word)
    for term in terms:
        values = term[elements].astype(form.wide)
        finite = np.isfinite(values)
        positive |= ~finite & ~(values < 0)
        negative |= ~finite & ~(values > 0)
        np.maximum(words, np.abs(np.where(finite, values, 0)).view(form.word), out=words)
    found = np.maximum.reduceat(words, np.cumsum(lengths[chosen]) - lengths[chosen]) >> form.fraction
    return Special(np.flatnonzero(chosen), elements, found.astype(form.exponents), positive, negative)


def add(
    terms: Sequence[np.ndarray],
    largest: np.ndarray,
    count: int,
    edges: np.ndarray,
    form: Format,
    out: np.ndarray,
    finite: bool = True,
) -> None:
    """Round each term to integers, and write the sums of the integers to `out`.

    largest: the exponent bits of each block, of all terms of all ranks. count: the number of all terms. out: 1-D,
    form.carrier. finite: whether all terms are; if not, infinities and NaN count as zeros.
    """
    powers = -quantum(largest, count, form)
    half = powers // 2 * (powers >= form.bias)  # two factors, because 2^1024 is no float64
    factors, rests = np.ldexp(1.0, powers - half), np.ldexp(1.0, half)
    if kernels.add_integers(terms, edges, factors, rests, finite, out):
        return
    if not len(terms):
        out[:] = 0
    scratch, halved = _scratch(edges, form.wide), half.any()
    factors, rests = factors.astype(form.wide), rests.astype(form.wide)  # float32 is faster, and as exact
    with np.errstate(all="ignore"):
        for blocks, span in _pieces(edges):
            values = scratch[: span.stop - span.start]
            for number, term in enumerate(terms):
                _multiply(_wide(term[span], values), factors[blocks], edges[blocks], values)
                if halved:
                    _multiply(values, rests[blocks], edges[blocks], values)
                np.rint(values, out=values)
                if not finite:
                    values[~np.isfinite(values)] = 0
                if number == 0:
                    np.copyto(out[span], values, casting="unsafe")
                else:
                    np.add(out[span], values, out=out[span], dtype=form.carrier, casting="unsafe")


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
    if kernels.finish(integers, inside, factors, divisor, out):
        return
    if form is SINGLE and divisor & (divisor - 1) == 0:
        factors, divisor = factors / divisor, 1  # exact, and faster than quotients
    scratch = _scratch(inside, factors.dtype)
    with np.errstate(all="ignore"):
        for blocks, span in _pieces(inside):
            values = scratch[: span.stop - span.start]
            if form is SINGLE and divisor > 1:
                quotients = np.divide(integers[span], divisor, out=values)
            else:
                quotients = quotient(integers[span], divisor)
            _multiply(quotients, factors[blocks], inside[blocks], values)
            values += 0.0  # -0.0 becomes 0.0
            np.copyto(out[span], _to_odd(values) if out.dtype == dtypes.BFLOAT16 else values, casting="unsafe")


def _pieces(edges: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks and the elements of pieces for which NumPy's temporary arrays stay in the cache."""
    for first in range(0, edges.size - 1, CACHED_BLOCKS):
        last = min(first + CACHED_BLOCKS, edges.size - 1)
        yield slice(first, last), slice(int(edges[first]), int(edges[last]))


def _scratch(edges: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return memory for the elements of one of the `_pieces`."""
    return np.empty(min(CACHED_BLOCKS * BLOCK, edges[-1] - edges[0]), dtype)


def _wide(values: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Return values in the dtype of `scratch`: themselves, or there."""
    if values.dtype != scratch.dtype:
        casts.cast(values, scratch)
        return scratch
    return values


def _multiply(values: np.ndarray, factors: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Multiply the elements of each block by its factor. starts: of the blocks, from any number on."""
    if values.size == factors.size * BLOCK:
        np.multiply(values.reshape(-1, BLOCK), factors[:, None], out=out.reshape(-1, BLOCK))
    else:
        np.multiply(values, np.repeat(factors, np.diff([*starts, starts[0] + values.size])), out=out)


def sum_blocks(
    terms: Sequence[np.ndarray], count: int, mean: bool, edges: np.ndarray, outs: Sequence[np.ndarray]
) -> bool:
    """Write the sum or mean of all terms of all ranks to the blocks `edges` of `outs`: the other functions in one pass
    over the memory. Returns False if there is no kernel for it."""
    bits = FORMATS[terms[0].dtype].bits - (count - 1).bit_length()
    return kernels.sum_fixed(terms, outs, edges, bits, count if mean else 1)


def finish_special(found: Special, out: np.ndarray, part: slice) -> None:
    """Write the infinities and NaN in the elements `part` of `out`. found: of all ranks."""
    inside = (found.elements >= part.start) & (found.elements < part.stop)
    elements = found.elements[inside]
    values = out[elements]
    positive, negative = found.positive[inside], found.negative[inside]
    values[positive] = np.inf
    values[negative] = -np.inf
    values[positive & negative] = np.nan
    out[elements] = values


def quantum(largest: np.ndarray, count: int, form: Format) -> np.ndarray:
    """Return the exponent t of each block's quantum; the module's docstring has the formula."""
    bits = form.bits - (count - 1).bit_length()
    return np.maximum(largest.astype(np.int32) - (form.bias + bits), form.least)


def quotient(integers: np.ndarray, count: int) -> np.ndarray:
    """Return integers / count as float64, rounded once. integers: int64, of at most 62 bits; count: <= MOST_TERMS."""
    if count == 1:
        return integers.astype(np.float64, copy=False)
    whole, rest = np.divmod(integers, count)
    digits, left = np.divmod(rest << 34, count)
    digits |= left != 0  # so that a value beside the middle of two floats is not rounded as if it was the middle
    exact = integers / count  # if integers are below 2^53
    long = (2 * whole | (rest != 0)).astype(np.float64) / 2  # if `whole` is not below 2^53
    other = whole + digits * 2.0**-34
    return np.where(np.abs(integers) < 2**53, exact, np.where(np.abs(whole) < 2**53, other, long))


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Round float64 to float32 so that one more rounding, to bfloat16, gives the bits of a single rounding.

    Truncate, then set the last bit if something was cut off ("round to odd": S. Boldo, G. Melquiond, 2008).
    """
    rounded = values.astype(np.float32)
    words = rounded.view(np.int32)
    inexact = rounded != values
    words -= np.abs(rounded) > np.abs(values)
    words |= inexact
    return rounded
