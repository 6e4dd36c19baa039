"""Combines float16 arrays in float32 by integer operations: the bits of NumPy's casts, several times as fast.

A 32-bit word holds two neighbouring elements. A float16's bits, moved to the positions of float32's sign, exponent and
fraction, are a float32 of 2^-112 times its value. Scaling by a power of two is exact, also for subnormals, so scaled
values sum to the scaled sum. The sum is formed at that scale, then converted back with one rounding (to nearest, ties
to even). Infinities, NaNs and sums beyond float16's range use NumPy's casts instead. The idea is F. Giesen's: half to
float done quick, 2012. (A process that flushes subnormals flushes them here, too.)
"""

from collections.abc import Sequence

import numpy as np

from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace

WORD = np.dtype(np.int32)  # signed: a right shift keeps the sign
FLOAT = np.dtype(np.float32)
NOTHING = slice(0, 0)
SCALE_FREE = (np.add, np.maximum, np.minimum)  # ufuncs f with f(c*a, c*b) == c*f(a, b) for c > 0

MAGNITUDE = np.uint16(0x7FFF)
INFINITY = 0x7C00
SCALE = 2.0**-112
OVERFLOW = np.float32(65520 * SCALE)  # from here on a sum rounds to infinity
MOVED = np.int32(~0x70001FFF)  # the bits of float32 that the bits of a float16 are moved to
SIGN = np.int32(-(2**31))
REST = np.int32(0x7FFF0000)  # exponent and fraction


def combine(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> slice:
    """Combine float16 arrays in order, apply op.finish, and write the result to `out`, which may be one of them.

    Returns the slice of `out` that is complete: all but an unpaired element at either end. The slice is empty, and
    `out` unchanged, if the values or the operation need NumPy's casts.
    """
    span = _whole_words(parts, out)
    if op.combine not in SCALE_FREE or span == NOTHING:
        return NOTHING
    words = [part[span].view(WORD) for part in parts]
    total, spare = (workspace.array(f"float16 {name}", 2 * words[0].size, WORD) for name in ("total", "spare"))
    largest = [_largest(part[span], spare) for part in parts]
    if max(largest) >= INFINITY:
        return NOTHING
    floats = total.view(FLOAT)
    _widen(words[0], total)
    for word in words[1:]:
        _widen(word, spare)
        op.combine(floats, spare.view(FLOAT), out=floats)
    op.finish(floats)
    may_overflow = sum(float(bits.view(np.float16)) for bits in largest) * SCALE >= OVERFLOW
    if may_overflow and (floats.max() >= OVERFLOW or floats.min() <= -OVERFLOW):
        return NOTHING
    _narrow(total, spare, out[span].view(WORD))
    return span


def _whole_words(parts: Sequence[np.ndarray], out: np.ndarray) -> slice:
    """Return the slice of `out` that whole 32-bit words cover; empty if the arrays' alignments differ."""
    places = {array.ctypes.data % WORD.itemsize for array in (out, *parts)}
    if len(places) > 1:
        return NOTHING
    begin = places.pop() // out.itemsize
    length = max(out.size - begin, 0) // 2 * 2
    return slice(begin, begin + length) if length else NOTHING


def _largest(part: np.ndarray, scratch: np.ndarray) -> np.uint16:
    """Return the bits of the largest magnitude; a NaN's are larger than all others."""
    magnitudes = np.bitwise_and(part.view(np.uint16), MAGNITUDE, out=scratch.view(np.uint16)[: part.size])
    return np.uint16(magnitudes.max())


def _widen(word: np.ndarray, out: np.ndarray) -> None:
    """Write to `out` the scaled float32 bits of every word's upper float16, then those of the lower ones."""
    upper, lower = out[: word.size], out[word.size :]
    np.right_shift(word, 3, out=upper)
    np.left_shift(word, 16, out=lower)
    np.right_shift(lower, 3, out=lower)
    np.bitwise_and(out, MOVED, out=out)


def _narrow(bits: np.ndarray, spare: np.ndarray, word: np.ndarray) -> None:
    """Inverse of `_widen`, with rounding: write to `word`; `bits` and `spare` are overwritten."""
    np.right_shift(bits, 13, out=spare)  # round: add half a unit, less the smallest bit where the last one is even
    np.bitwise_and(spare, 1, out=spare)
    np.add(bits, spare, out=bits)
    np.add(bits, 0xFFF, out=bits)
    np.bitwise_and(bits, SIGN, out=spare)  # close the gap of 3 bits between sign and exponent
    np.left_shift(bits, 3, out=bits)
    np.bitwise_and(bits, REST, out=bits)
    np.bitwise_or(bits, spare, out=bits)
    upper, lower = bits[: word.size], bits[word.size :].view(np.uint32)
    np.right_shift(lower, 16, out=lower)
    np.bitwise_or(upper, lower.view(WORD), out=word)
