"""MPI operations that call NumPy, for cases in which the MPI library's own operations differ."""

import functools
from typing import Any

import numpy as np
from mpi4py import MPI


@functools.cache
def numpy_operation(combine: np.ufunc, dtype: np.dtype) -> MPI.Op:
    """Return an MPI operation that calls `combine` on arrays of `dtype` in host memory. Local."""

    def call(before: Any, after: Any, _: MPI.Datatype) -> None:
        result = np.frombuffer(after, dtype)
        with np.errstate(all="ignore"):  # MPI calls it in any thread
            combine(np.frombuffer(before, dtype), result, out=result)

    # In rank order, so that all ranks select the same one of two NaNs, or of two zeros.
    return MPI.Op.Create(call, commute=False)
