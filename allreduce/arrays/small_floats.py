"""Casts between float32 and float16 or float8_e4m3fn: the bits of NumPy's and ml_dtypes' casts, in less time.

Rounding takes two float operations, x + m - m, with m = 1.5 * 2^(e + d) for 2^e <= |x| < 2^(e + 1), if the small float
has d bits less in its fraction: the last bit of a float32 sum with m is that of the small float. Below the least normal
number, e is that of this number: this rounds to subnormal numbers. The result times a power of two has the small
float's exponent and fraction in neighbouring bits (F. Giesen: half to float done quick, 2012). A thread that flushes
float32's subnormal numbers to zero would flush those of the small floats too, so NumPy and ml_dtypes cast there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from allreduce.arrays.dtypes import FLOAT16
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace

FLOAT, BITS = np.dtype(np.float32), np.dtype(np.int32)
TOO_LARGE = 65520  # the least number that float16 rounds to infinity
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class SmallFloat(NamedTuple):
    """How the bits of a small float and of float32 belong together."""

    word: np.dtype  # integers of its size
    sign: int
    not_finite: int  # the least code that is infinite or NaN
    dropped: int  # bits of float32's fraction that it has not
    least: int  # float32's bits of its least normal number, and of its largest power of two
    largest: int
    scale: np.float32  # the power of two that moves float32's exponents to its own


FORMATS = {
    FLOAT16: SmallFloat(np.dtype(np.uint16), 0x8000, 0x7C00, 13, 113 << 23, 142 << 23, np.float32(2.0**-112)),
    E4M3: SmallFloat(np.dtype(np.uint8), 0x80, 0x7F, 20, 121 << 23, 135 << 23, np.float32(2.0**-120)),
}


def flushes() -> bool:
    """Whether this thread flushes subnormal numbers to zero, as torch.set_flush_denormal asks."""
    return not np.float32(2.0**-149) * np.float32(2)


def narrow(values: np.ndarray, out: np.ndarray, scratch: np.ndarray, negated: np.ndarray) -> None:
    """Write float32 values to `out`, rounded to nearest, ties to even, and minus the rounded numbers to `negated`.

    values: float8 takes none between 464 and 512. scratch, negated: float32, as long; `negated` may be `values`, and is
    undefined where a value is not finite or `out` can't hold it.
    """
    if flushes():
        out[:] = values.astype(out.dtype)
        np.negative(out.astype(FLOAT), out=negated)
        return
    form = FORMATS[out.dtype]
    codes, bits = out.view(form.word), scratch.view(BITS)
    signs = np.signbit(values).astype(form.word)
    signs *= form.sign
    np.bitwise_and(values.view(BITS), 0x7F800000, out=bits)
    beyond = np.flatnonzero(bits > form.largest) if bits.max(initial=0) > form.largest else None
    casts = None if beyond is None else values[beyond].astype(out.dtype)
    bits.clip(form.least, form.largest, out=bits)
    bits += (form.dropped << 23) + (1 << 22)
    np.add(values, scratch, out=negated)
    np.subtract(scratch, negated, out=negated)  # +0 for both zeros, so values + negated is +0, as in C
    np.multiply(negated, form.scale, out=scratch)
    bits >>= form.dropped
    np.copyto(codes, bits, casting="unsafe")
    codes |= signs
    if beyond is not None:
        out[beyond] = casts


def widen(source: np.ndarray, out: np.ndarray) -> None:
    """Write small floats to `out`, float32."""
    if flushes():
        out[:] = source
        return
    form = FORMATS[source.dtype]
    bits, magnitudes = out.view(BITS), source.view(form.word) & (form.sign - 1)
    np.copyto(bits, source.view(f"i{source.itemsize}"))  # the sign fills the upper bits
    bits <<= form.dropped
    bits &= -(2**31) | (form.sign - 1) << form.dropped
    out *= 1 / form.scale
    if magnitudes.max(initial=0) >= form.not_finite:
        special = np.flatnonzero(magnitudes >= form.not_finite)
        out[special] = source[special]


def largest(short: np.ndarray) -> int:
    """Return the bits of the largest magnitude of 16-bit floats, as a number. NaNs are larger than infinity."""
    return max(int(short.view(np.int16).max(initial=0)), int(short.view(np.uint16).max(initial=0)) - 0x8000)


def combine(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> bool:
    """Write the sum, mean, maximum or minimum of float16 arrays to `out`, which may be one of them. Local.

    float16's bits, moved to those of float32's sign, exponent and fraction, are a float32 of 2^-112 times the value.
    All values are combined at this scale, at which powers of two scale float32 exactly, and rounded once by integers.
    Returns False, and leaves `out` unchanged, for other dtypes and operations, and if a value or a sum is not finite.
    """
    exact = op.scale is None or math.frexp(op.scale)[0] == 0.5
    if out.dtype != FLOAT16 or op.combine not in (np.add, np.maximum, np.minimum) or not exact or flushes():
        return False
    magnitudes = [largest(part) for part in parts]
    if max(magnitudes) >= FORMATS[FLOAT16].not_finite:
        return False
    bits, spare = workspace.array("bits", out.size, BITS), workspace.array("spare bits", out.size, BITS)
    total = bits.view(FLOAT)
    for number, part in enumerate(parts):
        wide = spare if number else bits
        np.copyto(wide, part.view(np.int16))  # the sign fills the upper bits
        wide <<= 13
        wide &= ~0x70001FFF
        if number:
            op.combine(total, wide.view(FLOAT), out=total)
    op.finish(total)
    most = sum(float(np.uint16(each).view(FLOAT16)) for each in magnitudes)
    if most >= TOO_LARGE and max(total.max(), -total.min()) >= np.float32(TOO_LARGE * 2.0**-112):
        return False
    signs = np.signbit(total).astype(np.uint16)
    signs <<= 15
    np.right_shift(bits, 13, out=spare)
    spare &= 1
    bits += spare  # ties to even
    bits += 0xFFF
    bits >>= 13
    np.copyto(out.view(np.uint16), bits, casting="unsafe")
    out.view(np.uint16)[...] |= signs
    return True
