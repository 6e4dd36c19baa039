"""Sums of squares of gradients, and products with a number."""

import math
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu

WIDTH = 1 << 16  # elements whose squares are added at a time


def sum_of_squares(array: Any) -> Any:
    """Return the sum of the squares of a 1-D array: a float, or a scalar on the GPU.

    Equal arrays give equal bits, also on processors of different kinds, on which those of a dot product may differ: it
    uses only operations on single elements, in a fixed order.
    """
    if gpu.is_gpu_array(array):
        single = array.astype("float32", copy=False) if dtypes.is_half(array.dtype) else array
        return single.dot(single).astype("float64")
    found = _sum_of_squares(array, np.float64 if array.dtype == np.float64 else np.float32)
    if not math.isfinite(found):  # squares of large float32 numbers overflow
        found = _sum_of_squares(array, np.float64)
    return found


@np.errstate(all="ignore")
def _sum_of_squares(array: np.ndarray, dtype: Any) -> float:
    sums, scratch = np.zeros(min(WIDTH, array.size), dtype), np.empty(min(WIDTH, array.size), dtype)
    for start in range(0, array.size, WIDTH):
        block = array[start : start + WIDTH]
        if block.dtype != dtype:
            block = block.astype(dtype)
        sums[: block.size] += np.multiply(block, block, out=scratch[: block.size])
    wide = sums.astype(np.float64)
    while wide.size > 1:
        half = -(-wide.size // 2)
        wide[: wide.size - half] += wide[half:]
        wide = wide[:half]
    return float(wide.sum())


def scale(array: Any, factor: float) -> None:
    """Multiply a 1-D array, or a tensor of PyTorch, in place; 16-bit floats in float32. Local."""
    factor = float(factor)  # of no dtype: the array's counts, and CuPy takes it too
    if not dtypes.is_half(array.dtype):
        array *= factor
        return
    for start in range(0, array.size, WIDTH):
        block = array[start : start + WIDTH]
        wide = block.astype(np.float32)
        wide *= factor
        block[:] = wide.astype(array.dtype)
