"""The grid: the results that every backend must give for every length, dtype, operation and kind of memory.

Values depend on rank and index. Results are compared with NumPy in float64; those of 16-bit floats with sums in float32
that are rounded once, to one unit in the last place. All ranks must hold the same bits.
"""

import functools
import os
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce.backend import AllReduce

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
OPS = ("sum", "mean", "max", "min", "prod")
QUICK = bool(os.environ.get("ALLREDUCE_TEST_QUICK"))  # set by `scripts/test.sh --quick`
PAD = 3  # elements before a slice of an allocated buffer, and behind it
SENTINEL = 5
PERIOD = 1009  # a prime, so each chunk begins elsewhere in it


class Bounds(NamedTuple):
    """The bounds of a result, element by element."""

    low: np.ndarray
    high: np.ndarray

    def hold(self, result: np.ndarray) -> bool:
        wide = result.astype(np.float32) if result.dtype.itemsize == 2 else result
        return bool(np.all((wide >= self.low) & (wide <= self.high)))


def shapes(ranks: int) -> dict[str, int | tuple[int, ...] | None]:
    """Return ways to divide `ranks` ranks into nodes: the real ones, simulated nodes of two, and uneven nodes."""
    nodes: dict[int, dict[str, int | tuple[int, ...]]] = {
        2: {"ones": 1},
        3: {"twos": 2, "uneven": (1, 2)},
        4: {"twos": 2, "uneven": (3, 1)},
        5: {"twos": 2, "uneven": (1, 3, 1)},
    }
    return {"flat": None, **nodes.get(ranks, {})}


def lengths(ranks: int) -> tuple[int, ...]:
    """Return lengths that the ranks divide and do not, with many ranks of MPICH, which take long, fewer."""
    if ranks > 3 and MPI.get_vendor()[0] == "MPICH":
        return (0, 1, ranks - 1, ranks + 1, 100003)
    return tuple(sorted({0, 1, ranks - 1, ranks, ranks + 1, 1000, 100003}))


def ops_at(place: int, dtype: np.dtype) -> tuple[str, str]:
    """Return "sum" or "mean", and one of the other operations, both in turn from place to place."""
    return OPS[0 if dtype.kind == "i" else place % 2], OPS[2 + place % 3]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@functools.cache
def values(dtype: np.dtype, length: int, rank: int, turn: int) -> np.ndarray:
    """Return the values of rank `rank` in round `turn`: floats of 0.5 to 1.5 and integers of 1 to 7, of both signs.
    They repeat after PERIOD elements."""
    mixed = (np.arange(PERIOD) * 7919 + rank * 104729 + turn * 15485863) % PERIOD
    sign = 1 - 2 * (mixed & 1)
    made = (sign * (mixed % 7 + 1) if dtype.kind == "i" else sign * (0.5 + mixed / PERIOD)).astype(dtype)
    made = np.resize(made, length)
    made.flags.writeable = False
    return made


@functools.cache
def expected(dtype: np.dtype, length: int, op: str, ranks: int, turn: int) -> Bounds:
    """Return the reduction of all ranks' values, with its tolerance."""
    low, high = _expected([values(dtype, PERIOD, rank, turn) for rank in range(ranks)], dtype, op)
    return Bounds(np.resize(low, length), np.resize(high, length))


def _expected(sides: list[np.ndarray], dtype: np.dtype, op: str) -> Bounds:
    if dtype.kind == "i":
        exact = _reduce(np.stack(sides), op)
        return Bounds(exact, exact)
    if dtype.itemsize == 2:
        return _one_unit(_reduce(np.stack(sides).astype(np.float32), op), dtype)
    wide = np.stack(sides).astype(np.float64)
    exact = _reduce(wide, op)
    size = np.abs(wide).sum(axis=0) if op in ("sum", "mean") else np.abs(exact)
    slack = 0 if op in ("max", "min") else len(sides) * np.finfo(dtype).eps * size
    return Bounds(exact - slack, exact + slack)


def _reduce(sides: np.ndarray, op: str) -> np.ndarray:
    function: Any = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op]
    return function(sides, axis=0) if op in ("max", "min") else function(sides, axis=0, dtype=sides.dtype)


def _one_unit(exact: np.ndarray, dtype: np.dtype) -> Bounds:
    """Return the bounds one unit in the last place of a 16-bit float below and above the rounded value."""
    rounded = exact.astype(dtype).astype(np.float32)
    bits, least = (10, -14) if dtype == np.float16 else (7, -126)
    exponent = np.maximum(np.frexp(rounded)[1] - 1, least)
    unit = np.ldexp(np.float32(1), exponent - bits)
    return Bounds(rounded - unit, rounded + unit)


def arrays(
    reduce: AllReduce, dtype: str, wanted: tuple[int, ...]
) -> Iterator[tuple[int, str, int, np.ndarray, np.ndarray]]:
    """Yield a place, kind, length, the array to reduce, and the whole memory around it. Collective.

    place: so that each kind and each length has several of the next ones.
    """
    parsed = numpy_dtype(dtype)
    large = reduce.allocate(max(wanted) + 2 * PAD, dtype)
    for place, length in enumerate(wanted):
        whole = reduce.allocate(length, dtype)
        assert length == 0 or whole.ctypes.data % 64 == 0  # or XLA copies it
        yield place, "allocated", length, whole, whole
        foreign = np.empty(length, parsed)
        yield place + 1, "foreign", length, foreign, foreign
        rows = next(rows for rows in (7, 5, 3, 2, 1) if length % rows == 0)
        table = np.empty((rows, length // rows), parsed, order="F" if length % 2 else "C")
        yield place + 2, "2-D", length, table, table
        if reduce.size <= 3:  # a slice is found in the same way on any number of ranks, and many ranks take long
            yield place + 5, "slice of allocated", length, large[PAD : PAD + length], large[: length + 2 * PAD]


def run_grid(reduce: AllReduce, dtype: str, comm: MPI.Intracomm, lengths_: tuple[int, ...] | None = None) -> int:
    """Run all lengths and kinds of memory of one dtype on a backend, each with two operations, twice, and raise
    AssertionError for those that fail.

    No rank stops at a failure, because the others would wait for it. Returns the number of cases.
    """
    failures: list[str] = []
    digests: dict[str, int] = {}
    for place, kind, length, array, around in arrays(reduce, dtype, lengths_ or lengths(comm.size)):
        for op in ops_at(place, array.dtype):
            for turn in (0, 1):
                case = f"{kind}, length {length}, {op}, turn {turn}"
                around[...] = SENTINEL
                array[...] = values(array.dtype, length, comm.rank, turn).reshape(array.shape)
                reduce(array, op)
                flat = array.reshape(-1)
                if not expected(array.dtype, length, op, comm.size, turn).hold(flat):
                    failures.append(f"{case}: {flat[:5]}")
                if around is not array and not _untouched(around):
                    failures.append(f"{case}: wrote outside of the slice")
                digests[case] = zlib.adler32(flat.view(np.uint8)) if length else 0
    compare(digests, comm)
    assert not failures, f"{len(failures)} wrong results, the first ones: " + "\n".join(failures[:5])
    return len(digests)


def compare(digests: dict[str, int], comm: MPI.Intracomm) -> None:
    """Raise on all ranks if they hold different bits after a case."""
    mine = np.fromiter(digests.values(), np.int64, len(digests))
    everyone = np.empty((comm.size, mine.size), np.int64)
    comm.Allgather(mine, everyone)
    different = np.flatnonzero((everyone != everyone[0]).any(axis=0))
    names = list(digests)
    assert not different.size, f"ranks hold different bits: {[names[index] for index in different[:5]]}"


def _untouched(around: np.ndarray) -> bool:
    return bool(np.all(around[:PAD] == SENTINEL) and np.all(around[-PAD:] == SENTINEL))
