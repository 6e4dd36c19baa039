"""Casts to and from 16-bit floats, and sums of them, which are formed in float32 and rounded once."""

from collections.abc import Iterable

import numpy as np

from allreduce import kernels
from allreduce.arrays.dtypes import TYPES
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace


def cast(source: np.ndarray, out: np.ndarray) -> None:
    """Write `source` to `out`: contiguous 1-D arrays of any dtypes; rounded to nearest, ties to even. Local.

    NaNs, infinities and overflows may cause NumPy's floating-point warnings: callers ignore them by np.errstate.
    """
    if not kernels.cast(source, out):
        np.copyto(out, source, casting="unsafe")


def widened(buffer: np.ndarray, workspace: Workspace) -> np.ndarray:
    """Return `buffer`, or a copy of 16-bit floats in scratch memory in the dtype in which they are summed. Local."""
    accumulator = TYPES[buffer.dtype].accumulator
    if accumulator == buffer.dtype:
        return buffer
    wide = workspace.array("wide", buffer.size, accumulator)
    np.copyto(wide, buffer)
    return wide


def combine(parts: Iterable[np.ndarray], out: np.ndarray, op: Op, workspace: Workspace) -> None:
    """Combine 1-D arrays in order in the accumulator's dtype, apply op.finish, and write the result to `out`. Local.

    parts: of the dtype and length of `out`, which may be one of them. A part is used before the next one is asked for.
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
