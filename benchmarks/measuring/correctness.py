"""#wrong: results against float64, with values that depend on rank and index."""

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.transport.control import combine

PERIOD = 8191  # prime, so that no chunk or segment that lands in the wrong place looks right
ROWS = 64  # periods compared at a time: they fit the cache


class Checker:
    """Fills arrays of one dtype and checks what one operation made of them.

    All ranks' values are known to every rank: they repeat after PERIOD elements and differ between ranks.
    """

    def __init__(self, comm: MPI.Intracomm, dtype: np.dtype, op: str) -> None:
        self._comm = comm
        everyone = np.stack([_values(rank, op) for rank in range(comm.size)])
        self._mine = _typed(everyone[comm.rank], dtype)
        self._low, self._high = _bounds(everyone, dtype, op)

    def fill(self, array: np.ndarray) -> None:
        """Put this rank's values into a 1-D array."""
        rows = _rows(array)
        rows[:] = self._mine
        rest = array[rows.size :]
        rest[:] = self._mine[: rest.size]

    def wrong(self, array: np.ndarray) -> int:
        """The number of wrong elements on all ranks, of an array that was filled and reduced. Collective."""
        rows = _rows(array)
        count = sum(self._outside(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS))
        count += self._outside(array[rows.size :])
        return int(combine(self._comm, np.array([count]), "count wrong elements")[0])

    def _outside(self, values: np.ndarray) -> int:
        wide = values.astype(self._low.dtype, copy=False)
        width = values.shape[-1]
        inside = (wide >= self._low[:width]) & (wide <= self._high[:width])  # false for NaN
        return int(inside.size - np.count_nonzero(inside))


def _rows(array: np.ndarray) -> np.ndarray:
    return array[: array.size // PERIOD * PERIOD].reshape(-1, PERIOD)


def _values(rank: int, op: str) -> np.ndarray:
    """One period in float64: whole numbers from -20 to 40; products stay small because most factors are 1 or -1."""
    index = np.arange(PERIOD)
    mixed = (index * 17 + rank * 29 + index * rank % 7) % 61
    if op != "prod":
        return (mixed - 20).astype(np.float64)
    return np.where(mixed % 2, 1.0, -1.0) * np.where((index + rank) % 61 == 0, 3.0, 1.0)


def _typed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Whole numbers as another dtype: of integers too short for them their last bits."""
    return values.astype(np.int64).astype(dtype)


def _bounds(everyone: np.ndarray, dtype: np.dtype, op: str) -> tuple[np.ndarray, np.ndarray]:
    """The least and largest right results: exact for integers and max/min, else a rounding error per summand."""
    accumulator, combine_all = dtypes.TYPES[dtype].accumulator, ops.OPS[op].combine.reduce
    exact: np.ndarray
    if dtype.kind in "iub":  # sums wrap round
        exact = combine_all(_typed(everyone, dtype), axis=0, dtype=dtype)
        return exact, exact
    exact = combine_all(everyone, axis=0)
    if op == "mean":
        exact = exact / len(everyone)
    if op in ("max", "min"):
        return exact.astype(accumulator), exact.astype(accumulator)
    size = np.abs(exact) if op == "prod" else np.abs(everyone).sum(axis=0)
    slack = size * (1 if op == "mean" else len(everyone)) * _epsilon(dtype)
    return (exact - slack).astype(accumulator), (exact + slack).astype(accumulator)


def _epsilon(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)
