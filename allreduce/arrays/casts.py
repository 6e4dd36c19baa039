"""Casts to and from shorter floats, and sums of 16-bit floats: the bits of NumPy's and ml_dtypes' casts, in less time.

If PyTorch is imported, its casts are used. Otherwise float16 is cast by integer operations: its bits, moved to the
places of float32's sign, exponent and fraction, are a float32 of 2^-112 times its value, also for subnormals.
(F. Giesen: half to float done quick, 2012.) Scaling by a power of two is exact, so scaled values sum to the scaled sum,
which is rounded once. (Any float32 is not rounded to float16 so: subnormals need so many more operations that little
time would be saved. A process that flushes subnormals flushes them here, too.)

Both ways have other bits for NaNs, and the integers for infinities. So arrays are cast in blocks that stay in the
cache, and NumPy casts the blocks that hold such values.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allreduce.arrays.chunks import segments
from allreduce.arrays.dtypes import BFLOAT16, FLOAT16, TYPES
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace

FLOAT = np.dtype(np.float32)
BITS, SHORT_BITS = np.dtype(np.int32), np.dtype(np.int16)
BLOCK = 64 * 1024  # elements that stay in the cache
SERIAL_BLOCK = 32 * 1024 - 64  # elements: PyTorch casts larger arrays on several threads, if it has them
INFINITY = 65536.0  # an infinite float16, taken for a number
HALF = 0.5
UP, DOWN = np.float32(2.0**112), 2.0**-112  # between the exponents of float16 and float32
OVERFLOW = np.float32(65520 * DOWN)  # from here on a scaled sum rounds to an infinite float16
SCALE_FREE = (np.add, np.maximum, np.minimum)  # ufuncs f with f(c*a, c*b) == c*f(a, b) for c > 0
DROPPED = 13  # bits of float32's fraction that float16 has not
MOVED = np.int32(~0x70001FFF)  # the bits of float32 that the bits of a float16 are moved to
BY_INTEGERS = FLOAT16, FLOAT
BY_TORCH = BY_INTEGERS, (FLOAT, FLOAT16), (FLOAT, BFLOAT16)
INFINITE = {FLOAT16: 0x7C00, BFLOAT16: 0x7F80}  # the bits of infinity; NaNs have larger ones
SIGN = 0x8000


def cast(source: np.ndarray, out: np.ndarray) -> None:
    """Write `source` to `out`: contiguous 1-D arrays of any dtypes; rounded to nearest, ties to even. Local.

    NaNs, infinities and overflows may cause NumPy's floating-point warnings: callers ignore them by np.errstate.
    """
    kinds = source.dtype, out.dtype
    torch = imported_torch() if kinds in BY_TORCH and source.flags.writeable else None
    if torch is None and kinds != BY_INTEGERS:
        np.copyto(out, source, casting="unsafe")
        return
    short = source if source.dtype != FLOAT else out
    for block in segments(slice(0, source.size), _step(torch)):
        given, written = source[block], out[block]
        if torch is None:
            done = _from_float16(given, written)
        else:
            _tensor(torch, written).copy_(_tensor(torch, given))
            done = _largest(short[block]) <= INFINITE[short.dtype]
        if not done:
            np.copyto(written, given, casting="unsafe")


def combine(parts: Iterable[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> None:
    """Combine 1-D arrays in order in the accumulator's dtype, apply op.finish, and write the result to `out`. Local.

    parts: of the dtype and length of `out`, which may be one of them.
    """
    accumulator = TYPES[out.dtype].accumulator
    total = workspace.array("total", out.size, accumulator)
    for number, part in enumerate(parts):
        if number == 0:
            cast(part, total)
        elif part.dtype == accumulator:
            op.combine(total, part, out=total)
        else:
            wide = workspace.array("wide part", out.size, accumulator)
            cast(part, wide)
            op.combine(total, wide, out=total)
    op.finish(total)
    cast(total, out)


def combine_halves(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> None:
    """Do as `combine` for 16-bit arrays, in a faster way if there is one. Local."""
    faster = add_pair if imported_torch() else combine_float16
    if not faster(parts, out, op, workspace):
        combine(parts, out, op, workspace)


def add_pair(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> bool:
    """Do as `combine` for the sum or mean of two 16-bit arrays, in 16 bits by PyTorch. Local.

    Returns False, and leaves `out` unchanged, if there are not two arrays, or PyTorch is not imported, or a sum is a
    NaN or infinite (a mean need not be).

    PyTorch adds in float32 and rounds once. Halving a finite sum then rounds only if the half is subnormal, and so
    small a sum was not rounded: it is a multiple of the smallest subnormal, as both arrays are.
    """
    torch = imported_torch() if len(parts) == 2 else None
    if torch is None or op.combine is not np.add or op.scale not in (None, HALF):
        return False
    total = workspace.array("short total", out.size, out.dtype)
    tensor, *given = (_tensor(torch, each) for each in (total, *parts))
    for block in segments(slice(0, out.size), out.size if torch.get_num_threads() == 1 else SERIAL_BLOCK):
        torch.add(given[0][block], given[1][block], out=tensor[block])
        if op.scale is not None:
            tensor[block].mul_(op.scale)  # an infinite sum stays infinite
    if _largest(total) >= INFINITE[out.dtype]:
        return False
    np.copyto(out, total)
    return True


def combine_float16(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> bool:
    """Do as `combine` for float16, by integer operations. Local.

    Returns False, and leaves `out` unchanged, for other arrays, and for operations, infinities, NaNs and overflows that
    need NumPy's casts.
    """
    if out.dtype != FLOAT16 or op.combine not in SCALE_FREE:
        return False
    largest = [_largest(part) for part in parts]
    if max(largest) >= INFINITE[FLOAT16]:
        return False
    total, spare = (workspace.array(f"float16 {name}", out.size, BITS) for name in ("total", "spare"))
    floats = total.view(FLOAT)
    widen(parts[0].view(SHORT_BITS), total, DROPPED, MOVED)
    for part in parts[1:]:
        widen(part.view(SHORT_BITS), spare, DROPPED, MOVED)
        op.combine(floats, spare.view(FLOAT), out=floats)
    op.finish(floats)
    may_overflow = sum(float(np.uint16(bits).view(FLOAT16)) for bits in largest) * DOWN >= OVERFLOW
    if may_overflow and (floats.max() >= OVERFLOW or floats.min() <= -OVERFLOW):
        return False
    codes = out.view(np.uint16)
    narrow(total, codes, DROPPED, spare, workspace.array("float16 signs", codes.size, codes.dtype))
    return True


def widen(codes: np.ndarray, bits: np.ndarray, dropped: int, moved: np.int32) -> None:
    """Write to `bits` the bits of short floats, moved to the places of float32's. Local.

    codes: signed integers. dropped: the bits of float32's fraction that the short floats have not. moved: the bits of
    float32 that remain.
    """
    np.copyto(bits, codes)  # the sign fills the upper bits
    np.left_shift(bits, dropped, out=bits)
    np.bitwise_and(bits, moved, out=bits)


def narrow(bits: np.ndarray, codes: np.ndarray, dropped: int, spare: np.ndarray, signs: np.ndarray) -> None:
    """Do the inverse of `widen`, rounded to nearest, ties to even. Local.

    bits: overwritten by the rounded ones, which must fit the codes' exponents. codes: unsigned integers. spare: like
    `bits`, signs: like `codes`; both are overwritten.
    """
    sign = 8 * codes.itemsize - 1
    np.right_shift(bits, dropped, out=spare)  # add half a unit, less the smallest bit where the last one is even
    np.bitwise_and(spare, 1, out=spare)
    np.add(bits, spare, out=bits)
    np.add(bits, (1 << (dropped - 1)) - 1, out=bits)
    np.right_shift(bits, dropped, out=spare)  # exponent and fraction; the sign is in the upper bits
    np.copyto(codes, spare, casting="unsafe")
    np.right_shift(bits, 31 - sign, out=spare)
    np.copyto(signs, spare, casting="unsafe")
    np.bitwise_and(signs, 1 << sign, out=signs)
    np.bitwise_or(codes, signs, out=codes)


def imported_torch() -> Any:
    """Return PyTorch, if it is imported completely, or None. Local."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "compile") else None


def _step(torch: Any) -> int:
    """Return the elements of a block."""
    return BLOCK if torch is None or torch.get_num_threads() == 1 else SERIAL_BLOCK


def _largest(short: np.ndarray) -> int:
    """Return the bits of the largest magnitude, without the sign, of 16-bit floats of which there is at least one."""
    positive, negative = short.view(SHORT_BITS).max(), short.view(np.uint16).max()
    return max(int(positive), int(negative) - SIGN)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(SHORT_BITS)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_float16(source: np.ndarray, out: np.ndarray) -> bool:
    """Cast float16 to float32; return False if there is a NaN or an infinity."""
    widen(source.view(SHORT_BITS), out.view(BITS), DROPPED, MOVED)
    np.multiply(out, UP, out=out)
    return bool(out.max() < INFINITY and out.min() > -INFINITY)
