"""Sums of floats whose bits depend on nothing but the terms: not on their order, nor on how they are divided.

The terms of a sum are arrays of one length. They are cut into blocks of up to BLOCK elements. For each block, the
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

from allreduce.arrays import dtypes
from allreduce.arrays.workspace import Workspace

BLOCK = 256  # elements that share an exponent, unless a part of the model ends before
PIECE = 32 * 1024  # elements that are converted at a time, so that scratch memory stays in the cache
MOST_TERMS = 2**24  # beyond, the quantum would be too coarse for float32


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


class BlockRun(NamedTuple):
    """Consecutive whole blocks, converted together. lengths: of the blocks; None if each has BLOCK elements."""

    start: int
    stop: int
    first: int  # the number of its first block
    blocks: int
    lengths: np.ndarray | None

    def largest(self, words: np.ndarray) -> np.ndarray:
        """Return the largest word of each block. words: of this piece."""
        if self.lengths is None:
            return words.reshape(self.blocks, BLOCK).max(axis=1)
        return np.maximum.reduceat(words, np.cumsum(self.lengths) - self.lengths)

    def multiply(self, array: np.ndarray, factors: np.ndarray, out: np.ndarray) -> None:
        """Multiply the elements of each block by the block's factor."""
        if self.lengths is None:
            shape = self.blocks, BLOCK
            np.multiply(array.reshape(shape), factors[:, None], out=out.reshape(shape))
        else:
            np.multiply(array, np.repeat(factors, self.lengths), out=out)

    def within(self, part: slice) -> "BlockRun":
        """Return the part of this piece that lies in `part`, with blocks cut off at its ends; may be empty."""
        start, stop = max(self.start, part.start), min(self.stop, part.stop)
        if (start, stop) == (self.start, self.stop):
            return self
        if start >= stop:
            return BlockRun(start, start, self.first, 0, np.empty(0, np.intp))
        lengths = np.full(self.blocks, BLOCK) if self.lengths is None else self.lengths
        ends = self.start + np.cumsum(lengths)
        kept = np.minimum(ends, stop) - np.maximum(ends - lengths, start)
        inside = np.flatnonzero(kept > 0)
        return BlockRun(start, stop, self.first + int(inside[0]), inside.size, kept[inside])


class BlockLayout:
    """The blocks of an array of `length` elements.

    starts: where parts of the model begin, ascending, the first at 0; blocks begin anew there. So a slice of whole
        parts has the same blocks as these parts have in the whole array.
    """

    def __init__(self, length: int, starts: Sequence[int] = (0,)) -> None:
        self.length, self.blocks = length, 0
        self.pieces: list[BlockRun] = []
        self._loose: list[int] = []  # lengths of blocks that are not in a piece yet
        at = 0
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            whole = (stop - start) // BLOCK
            for first in range(0, whole, PIECE // BLOCK):
                at = self._close(at)
                blocks = min(whole - first, PIECE // BLOCK)
                at = self._add(at, blocks * BLOCK, blocks, None)
            if rest := (stop - start) % BLOCK:
                if sum(self._loose) + rest > PIECE:
                    at = self._close(at)
                self._loose.append(rest)
        self._close(at)

    def _close(self, at: int) -> int:
        """Make a piece, at element `at`, of the loose blocks. Returns where it ends."""
        lengths, self._loose = np.array(self._loose, np.intp), []
        return self._add(at, int(lengths.sum()), lengths.size, lengths) if lengths.size else at

    def _add(self, at: int, length: int, blocks: int, lengths: np.ndarray | None) -> int:
        self.pieces.append(BlockRun(at, at + length, self.blocks, blocks, lengths))
        self.blocks += blocks
        return at + length

    def pieces_in(self, part: slice) -> Iterator[BlockRun]:
        """Yield the parts of all pieces that lie in `part`."""
        for piece in self.pieces:
            if piece.start < part.stop and part.start < piece.stop:
                yield piece.within(part)

    def elements(self, blocks: np.ndarray) -> np.ndarray:
        """Return the indices of all elements of these blocks. blocks: numbers, ascending."""
        found = [np.empty(0, np.intp)]
        for piece in self.pieces:
            own = blocks[(blocks >= piece.first) & (blocks < piece.first + piece.blocks)] - piece.first
            if own.size:
                lengths = np.full(piece.blocks, BLOCK) if piece.lengths is None else piece.lengths
                chosen = np.zeros(piece.blocks, bool)
                chosen[own] = True
                found.append(piece.start + np.flatnonzero(np.repeat(chosen, lengths)))
        return np.concatenate(found)


def exponents(terms: Sequence[np.ndarray], layout: BlockLayout, form: Format, scratch: Workspace) -> np.ndarray:
    """Return the largest exponent bits in each block of these terms: (blocks,) form.exponents.

    terms: 1-D arrays of layout.length elements; there may be none. The other functions take
    the maximum over all ranks.
    """
    found = np.zeros(layout.blocks, form.exponents)
    if not len(terms):
        return found
    rooms = [scratch.array(name, PIECE, form.word) for name in ("largest", "spare")]
    for piece in layout.pieces:
        largest, spare = (room[: piece.stop - piece.start] for room in rooms)
        for number, term in enumerate(terms):
            words = _read(term, piece, form, scratch).view(form.word)
            np.bitwise_and(words, form.magnitude, out=spare if number else largest)
            if number:
                np.maximum(largest, spare, out=largest)
        found[piece.first : piece.first + piece.blocks] = piece.largest(largest) >> form.fraction
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


def special(terms: Sequence[np.ndarray], largest: np.ndarray, layout: BlockLayout, form: Format) -> Special | None:
    """Return the Special of these terms, or None if all terms of all ranks are finite. largest: of all ranks."""
    blocks = np.flatnonzero(largest == form.not_finite)
    if not blocks.size:
        return None
    elements = layout.elements(blocks)
    positive, negative = np.zeros((2, elements.size), bool)
    words = np.zeros(layout.length, form.word)
    for term in terms:
        values = term[elements].astype(form.wide)
        finite = np.isfinite(values)
        positive |= ~finite & ~(values < 0)
        negative |= ~finite & ~(values > 0)
        magnitudes = np.abs(np.where(finite, values, 0)).view(form.word)
        words[elements] = np.maximum(words[elements], magnitudes)
    found = np.concatenate([piece.largest(words[piece.start : piece.stop]) for piece in layout.pieces])[blocks]
    return Special(blocks, elements, (found >> form.fraction).astype(form.exponents), positive, negative)


def add(
    terms: Sequence[np.ndarray],
    largest: np.ndarray,
    count: int,
    layout: BlockLayout,
    form: Format,
    scratch: Workspace,
    out: np.ndarray,
    finite: bool = True,
) -> None:
    """Round each term to integers, and write the sums of the integers to `out`.

    largest: the exponent bits of each block, of all terms of all ranks. count: the number of all terms. out: 1-D,
    form.carrier. finite: whether all terms are; if not, infinities and NaN count as zeros.
    """
    if not len(terms):
        out[:] = 0
        return
    powers = -quantum(largest, count, form)
    half = powers // 2 * (powers >= form.bias)  # two factors, because 2^128 is no float32, and 2^1024 no float64
    one = form.wide.type(1)  # a power of two scales elements without rounding, and float32 is faster than float64
    factors, rest = np.ldexp(one, powers - half), np.ldexp(one, half) if half.any() else None
    room = scratch.array("rounded", PIECE, form.wide)
    with np.errstate(all="ignore"):
        for piece in layout.pieces:
            total, span = out[piece.start : piece.stop], slice(piece.first, piece.first + piece.blocks)
            into = room[: total.size]
            for number, term in enumerate(terms):
                piece.multiply(_read(term, piece, form, scratch), factors[span], into)
                if rest is not None:
                    piece.multiply(into, rest[span], into)
                np.rint(into, out=into)
                if not finite:
                    into[~np.isfinite(into)] = 0
                if not number:
                    np.copyto(total, into, casting="unsafe")
                elif form is SINGLE:
                    np.add(total, into, out=total)
                else:
                    np.add(total, into.astype(form.carrier), out=total)


def finish(
    integers: np.ndarray,
    largest: np.ndarray,
    count: int,
    mean: bool,
    layout: BlockLayout,
    form: Format,
    scratch: Workspace,
    out: np.ndarray,
    part: slice,
) -> None:
    """Round the sums of all terms, or their means, to the elements `part` of `out`.

    integers: the integers that `add` has written, summed over all ranks; complete in `part`.
    """
    factors = np.ldexp(1.0, quantum(largest, count, form))
    divides = mean
    if mean and form is SINGLE and count & (count - 1) == 0:
        factors, divides = factors / count, False
    room = scratch.array("scaled", PIECE, np.dtype(np.float64))
    with np.errstate(all="ignore"):
        for piece in layout.pieces_in(part):
            values, span = room[: piece.stop - piece.start], slice(piece.start, piece.stop)
            np.add(integers[span], 0.0, out=values)  # -0.0 becomes 0.0
            if divides and form is SINGLE:
                np.divide(values, count, out=values)
            elif divides:
                values[:] = quotient(integers[span], count)
            piece.multiply(values, factors[piece.first : piece.first + piece.blocks], values)
            np.copyto(out[span], _to_odd(values) if out.dtype == dtypes.BFLOAT16 else values, casting="unsafe")


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
        return integers.astype(np.float64)
    whole, rest = np.divmod(integers, count)
    digits, left = np.divmod(rest << 34, count)
    digits |= left != 0  # so that a value beside the middle of two floats is not rounded as if it was the middle
    exact = integers / count  # if integers are below 2^53
    long = (2 * whole | (rest != 0)).astype(np.float64) / 2  # if `whole` is not below 2^53
    other = whole + digits * 2.0**-34
    return np.where(np.abs(integers) < 2**53, exact, np.where(np.abs(whole) < 2**53, other, long))


def _read(term: np.ndarray, piece: BlockRun, form: Format, scratch: Workspace) -> np.ndarray:
    """Return a piece of a term in the dtype form.wide."""
    values = term[piece.start : piece.stop]
    if values.dtype == form.wide:
        return values
    wide = scratch.array("wide", values.size, form.wide)
    np.copyto(wide, values)
    return wide


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


layout_of = lru_cache(maxsize=64)(BlockLayout)  # made once for equal arguments
