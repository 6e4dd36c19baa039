"""Clipping of averaged gradients by their norm. R. Pascanu et al.: On the difficulty of training recurrent neural
networks, 2013."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds it to the norm
WIDTH = 1 << 16  # elements whose squares are added at a time


def clip(gradients: Sequence[Any], most: float, squares: Any) -> tuple[Any, float | None]:
    """Scale 1-D gradients, so that the norm of all gradients of the model is at most `most`. Local.

    squares: the sum of the squares of all gradients, of which these may be a part. Returns the norm before, a number,
    perhaps on the GPU, and the factor by which all other gradients are to be scaled; None if they are not.
    """
    norm = squares**0.5
    factor = most / (norm + EPSILON)
    if gpu.is_gpu_array(norm):
        for each in gradients:
            each *= gpu.cupy().minimum(factor, 1.0).astype(each.dtype)
    elif not factor >= 1:  # also NaN, which then shows in the loss
        for each in gradients:
            scale(each, factor)
    else:
        return norm, None
    return norm, min(float(factor), 1.0) if factor == factor else math.nan


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


def scale(array: np.ndarray, factor: float) -> None:
    """Multiply a 1-D array in place; 16-bit floats in float32. Local."""
    if not dtypes.is_half(array.dtype):
        array *= array.dtype.type(factor)
        return
    for start in range(0, array.size, WIDTH):
        block = array[start : start + WIDTH]
        block[:] = (block.astype(np.float32) * np.float32(factor)).astype(array.dtype)
