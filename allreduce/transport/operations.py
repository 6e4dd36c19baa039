"""Operations of MPI that do what NumPy's do, where the MPI library's own may not."""

import functools
from typing import Any

import numpy as np
from mpi4py import MPI


@functools.cache
def numpy_operation(combine: np.ufunc, dtype: np.dtype) -> MPI.Op:
    """`combine` as an operation of MPI, on arrays of `dtype` in the host's memory."""

    def call(before: Any, after: Any, _: MPI.Datatype) -> None:
        result = np.frombuffer(after, dtype)
        with np.errstate(all="ignore"):  # MPI calls it in any thread
            combine(np.frombuffer(before, dtype), result, out=result)

    # In the order of the ranks, so that of two NaNs, or of two zeros, all ranks take the same.
    return MPI.Op.Create(call, commute=False)
