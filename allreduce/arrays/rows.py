"""Sparse rows of a table: argument checks, sums of duplicate rows, merged indices of all ranks. No communication."""

from typing import Any

import numpy as np

from allreduce.arrays import gpu
from allreduce.arrays.arguments import is_integer
from allreduce.errors import NotAnArrayError, OptionError

INDEX = np.dtype(np.int64)
LARGEST_TABLE = 2**40 - 1  # elements; the limit of a buffer, too
OPS = ("sum", "mean")
DENSE_RATIO, DENSE_BYTES = 2, 1 << 20  # see dense_is_cheaper

Rows = tuple[np.ndarray, np.ndarray]  # indices, and a row of values for each


def dense_is_cheaper(passed: int, found: int, nbytes: int) -> bool:
    """Return whether reducing the rows as one dense array is cheaper than gathering every rank's rows.

    passed: number of rows that all ranks pass. found: number of distinct indices. nbytes: size of the sums.
    """
    return nbytes >= DENSE_BYTES and passed >= DENSE_RATIO * found


def checked(indices: Any, values: Any, rows: int) -> Rows:
    """Check the arguments of a sparse sum; return them in host memory, indices as int64.

    Raises OptionError or NotAnArrayError.
    """
    if not is_integer(rows, 0):
        raise OptionError(f"rows={rows!r}: give the number of the table's rows, an integer from 0 on")
    for name, array in (("indices", indices), ("values", values)):
        if not isinstance(array, np.ndarray | np.generic) and not gpu.is_gpu_array(array):
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise NotAnArrayError(f"sparse() takes {name} as a NumPy or CuPy array, not {kind}")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise NotAnArrayError(
            f"indices must be a 1-D array of integers, not one of shape {indices.shape} and dtype {indices.dtype}"
        )
    if values.ndim == 0 or values.shape[0] != indices.size:
        raise NotAnArrayError(
            f"values must have one row for each of the {indices.size} indices; their shape is {values.shape}"
        )
    found, passed = (each.get() if gpu.is_gpu_array(each) else np.asarray(each) for each in (indices, values))
    if found.size and not (found.min() >= 0 and found.max() < rows):
        wrong = found[(found < 0) | (found >= rows)]
        raise OptionError(
            f"{wrong.size} of {found.size} indices are out of range for a table of {rows} rows "
            f"(the first is {wrong[0]}); use 0 to {rows - 1}"
        )
    length = int(rows) * int(np.prod(values.shape[1:], dtype=object))
    if length > LARGEST_TABLE:
        raise OptionError(f"rows={rows!r} of shape {values.shape[1:]} are {length} elements; at most {LARGEST_TABLE}")
    return found.astype(INDEX, copy=False), passed


def without_duplicates(indices: np.ndarray, values: np.ndarray, accumulator: np.dtype) -> Rows:
    """Add rows with equal indices. Returns distinct ascending indices, and 2-D sums of the accumulator's dtype."""
    table = values.reshape(indices.size, int(np.prod(values.shape[1:], dtype=np.int64)))
    if (indices[1:] > indices[:-1]).all():
        return np.ascontiguousarray(indices), np.ascontiguousarray(table, accumulator)
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    first = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    rows = table[order].astype(accumulator, copy=False)
    if first.all():
        return ordered, rows
    # without a dtype NumPy would widen short integers
    return ordered[first], np.add.reduceat(rows, np.flatnonzero(first), axis=0, dtype=accumulator)


def merge_indices(everyone: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the distinct indices of all ranks, ascending, and for each rank the positions of its indices among them.

    everyone: the ranks' indices, one rank after the other. counts: how many each rank has.
    """
    found, where = np.unique(everyone, return_inverse=True)
    return found, np.split(where.reshape(-1), np.cumsum(counts)[:-1])
