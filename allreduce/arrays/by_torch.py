"""Casts and sums of 16-bit floats by PyTorch, if the program has imported it: the bits of NumPy and ml_dtypes, sooner.

PyTorch adds two 16-bit floats in float32 and rounds once. NumPy takes the cases in which PyTorch has other bits:
NaNs, and a thread that flushes subnormal numbers. PyTorch's threads would use other ranks' cores, so it gets short
pieces.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allreduce.arrays.chunks import segments
from allreduce.arrays.dtypes import BFLOAT16, FLOAT16
from allreduce.arrays.ops import Op
from allreduce.arrays.small_floats import FLOAT, flushes, largest
from allreduce.arrays.workspace import Workspace

SERIAL = 32 * 1024 - 64  # elements that PyTorch never divides among threads
INFINITY = {FLOAT16: 0x7C00, BFLOAT16: 0x7F80}  # bits; NaNs have larger ones
CASTS = (FLOAT16, FLOAT), (FLOAT, FLOAT16), (FLOAT, BFLOAT16)  # NumPy widens bfloat16 as fast


def imported() -> Any:
    """Return PyTorch, if it is imported completely and has NumPy's bits in this thread, or None. Local."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "compile") and not flushes() else None


def cast(source: np.ndarray, out: np.ndarray) -> bool:
    """Write `source` to `out`. Returns False, and writes nothing, if NumPy must do it. Local."""
    torch = imported() if (source.dtype, out.dtype) in CASTS and source.flags.writeable else None
    if torch is None:
        return False
    for piece in _pieces(torch, out.size):
        given, written = source[piece], out[piece]
        _tensor(torch, written).copy_(_tensor(torch, given))
        short = given if given.dtype != FLOAT else written
        if largest(short) > INFINITY[short.dtype]:
            np.copyto(written, given, casting="unsafe")
    return True


def add(parts: Sequence[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> bool:
    """Write the sum or mean of two 16-bit arrays to `out`, which may be one of them. Local.

    Returns False, and leaves `out` unchanged, if NumPy must do it: also if a sum is a NaN, or is infinite, because the
    mean may be finite. Halving a finite sum rounds only if the half is subnormal; so small a sum was not rounded,
    because both terms are multiples of the least subnormal number.
    """
    torch = imported() if out.dtype in INFINITY and len(parts) == 2 else None
    if torch is None or not op.adds or op.scale not in (None, 0.5) or not all(part.flags.writeable for part in parts):
        return False
    total = workspace.array("short total", out.size, out.dtype)
    tensor, *given = (_tensor(torch, each) for each in (total, *parts))
    for piece in _pieces(torch, out.size):
        torch.add(given[0][piece], given[1][piece], out=tensor[piece])
        if op.scale is not None:
            tensor[piece].mul_(op.scale)
    if largest(total) >= INFINITY[out.dtype]:
        return False
    np.copyto(out, total)
    return True


def _pieces(torch: Any, length: int) -> Iterator[slice]:
    return segments(slice(0, length), SERIAL if torch.get_num_threads() > 1 else max(length, 1))


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
