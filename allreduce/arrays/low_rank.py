"""Arithmetic of PowerSGD: which parts of a buffer are matrices, and their products of thin factors. Pure, no MPI.

Factors are stored with one row for each column of the paper's P and Q: `left` is P transposed, (rank, rows), and
`right` is Q transposed, (rank, columns).
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allreduce.arrays.parts import Part

BLOCK = 128 * 1024  # elements that are multiplied at a time
LONG = 64 * 1024  # elements: longer parts that are not compressed are not packed
DIGITS = 53  # binary digits of float64
PASSES = 4  # the most that a column is made orthogonal to the others


class Matrix(NamedTuple):
    """A part of a buffer that is sent as a product of two factors with `rank` rows."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class Plan(NamedTuple):
    """The division of a buffer: its matrices, and slices between them that are short enough to be packed, or not."""

    matrices: list[Matrix]
    short: list[slice]
    long: list[slice]


class Tile(NamedTuple):
    """Neighbouring elements of a matrix: a slice of a buffer, and its rows and columns in the matrix."""

    where: slice
    rows: slice
    columns: slice

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """Return the tile of a whole buffer, a 2-D view."""
        return self.table(buffer[self.where])

    def table(self, elements: np.ndarray) -> np.ndarray:
        """Return the tile's elements as a 2-D view."""
        return elements.reshape(-1, self.columns.stop - self.columns.start)


def shape(part: Part) -> tuple[int, int]:
    """Return the rows and columns of a part: its first axis x the others."""
    return (part.shape[0], math.prod(part.shape[1:])) if part.shape else (1, 1)


def matrix(part: Part, rank: int, least_rate: float) -> Matrix | None:
    """Return the matrix that a part of two or more dimensions is compressed as, or None.

    least_rate: the least ratio of the part's elements to the elements of both factors.
    """
    rows, columns = shape(part)
    used = min(rank, rows, columns)
    if len(part.shape) < 2 or not used or used * (rows + columns) * least_rate > rows * columns:
        return None
    return Matrix(part.start, rows, columns, used)


@lru_cache(maxsize=256)
def plan(parts: tuple[Part, ...], length: int, rank: int, least_rate: float) -> Plan:
    """Divide a buffer of `length` elements. parts: in the order of their positions."""
    matrices = [found for part in parts if (found := matrix(part, rank, least_rate)) is not None]
    starts, stops = [each.start for each in matrices], [each.stop for each in matrices]
    gaps = [slice(*ends) for ends in zip([0, *stops], [*starts, length], strict=True) if ends[0] < ends[1]]
    short = [gap for gap in gaps if gap.stop - gap.start <= LONG]
    return Plan(matrices, short, [gap for gap in gaps if gap not in short])


def tiles(of: Matrix, share: slice) -> Iterator[Tile]:
    """Cut a slice of a matrix's elements into tiles: whole rows, or a part of one."""
    step = max(BLOCK // of.columns, 1)
    begin = share.start
    while begin < share.stop:
        row, column = divmod(begin, of.columns)
        whole = 0 if column else min((share.stop - begin) // of.columns, step)
        stop = begin + whole * of.columns if whole else min(begin - column + of.columns, share.stop)
        columns = slice(0, of.columns) if whole else slice(column, column + stop - begin)
        yield Tile(slice(of.start + begin, of.start + stop), slice(row, row + max(whole, 1)), columns)
        begin = stop


def start_factor(held: np.ndarray | None, of: Matrix, dtype: np.dtype, seed: Sequence[int]) -> np.ndarray:
    """Return the factor `right` to begin with: `held`, the last call's, where it is not zero, else random numbers.

    Each row is scaled by a power of two, so that very small gradients don't underflow. Depends on the arguments only.
    """
    if held is None or held.shape != (of.rank, of.columns):
        held = np.zeros((of.rank, of.columns), dtype)
    top = np.abs(held).max(axis=1)
    lost = ~((top > 0) & np.isfinite(top))  # nothing would ever come back: the product with zeros is zero
    factor = np.ldexp(held, -np.frexp(np.where(lost, 1, top))[1][:, None]).astype(dtype, copy=False)
    if lost.any():
        drawn = np.random.default_rng(seed).normal(size=factor.shape)
        factor[lost] = drawn[lost]
    return factor


def orthogonalize(columns: np.ndarray) -> None:
    """Make vectors, the rows of a 2-D array, orthonormal in place, in order; zero vectors stay zero.

    Gram-Schmidt with repetition: a vector is orthogonalized at least twice, and again while that more than halves its
    norm (L. Giraud et al.: Rounding error analysis of the classical Gram-Schmidt orthogonalization process, 2005). A
    vector that depends on earlier ones becomes some vector that is orthogonal to these.

    Only elementwise operations and np.add.reduce are used, so the bits do not depend on the processor.
    """
    exponents = np.frexp(np.abs(columns).max(axis=1, initial=0))[1]
    columns[...] = np.ldexp(columns, -exponents[:, None])  # so that squares don't overflow or underflow
    for number, vector in enumerate(columns):
        earlier = columns[:number]
        norm = _norm(vector)
        for turn in range(PASSES):
            before = norm
            if number:
                parts = np.add.reduce(earlier * vector, axis=1)
                vector -= np.add.reduce(earlier * parts[:, None], axis=0)
                norm = _norm(vector)
            if turn and not norm < before / 2:
                break
        else:
            vector[...] = 0
        if norm > 0:
            vector /= norm


def _norm(vector: np.ndarray) -> np.floating:
    return np.sqrt(np.add.reduce(vector * vector))


def fixed_point(factor: np.ndarray) -> np.ndarray:
    """Round a factor so that products of two such factors are exact in float64. Returns a new (rank + 1, ...) array.

    All elements become integers of at most `bits` bits times one power of two. So each element of a product is a sum of
    at most 2^(DIGITS - 2 bits) integers of 2 bits bits: float64 holds it, and all partial sums, exactly, whatever order
    or fused multiply-adds a BLAS uses. A last row of zeros makes every zero sum +0.
    """
    rank = len(factor)
    bits = (DIGITS - math.ceil(math.log2(rank))) // 2
    unit = float(np.ldexp(1.0, max(int(np.frexp(np.abs(factor).max())[1]), -900) - bits))
    rounded = np.zeros((rank + 1, factor.shape[1]))
    np.divide(factor, unit, out=rounded[:rank], dtype=rounded.dtype)  # in float32 the unit may be zero
    np.rint(rounded, out=rounded)
    rounded *= unit
    return rounded
