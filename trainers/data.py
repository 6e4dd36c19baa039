"""Which rows a rank sees: the same seeded permutation on every rank, and every rank's share of each batch.

A batch is global. Batch s of an epoch is rows order[s * B : (s + 1) * B]; rank r takes the r-th chunk of
it. So the batches do not depend on the number of ranks; the last may be short, and a rank may have no row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from allreduce.arrays.chunks import chunk


def order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch (0, 1, ...) visits the rows; (rows,) int64, a function of its arguments alone."""
    if not shuffle:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Batch(NamedTuple):
    """A rank's share of one global batch; the arrays are overwritten by the next batch."""

    x: np.ndarray
    y: np.ndarray
    rows: int  # in the global batch
    share: float  # this rank's rows / rows


class Batches:
    """The shares of one rank, epoch by epoch.

    x, y: the whole data set, the same on every rank (a memory-mapped array will do).
    batch_size: rows in a global batch.
    """

    def __init__(
        self, x: np.ndarray, y: np.ndarray, batch_size: int, rank: int, ranks: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._x, self._y = x, y
        self.rows, self.batch_size = len(x), min(batch_size, len(x))
        self._rank, self._ranks = rank, ranks
        self._seed, self._shuffle = seed, shuffle
        most = -(-self.batch_size // ranks)
        self._x_batch = np.empty((most, *x.shape[1:]), x.dtype)
        self._y_batch = np.empty((most, *y.shape[1:]), y.dtype)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-self.rows // self.batch_size)

    def sizes(self) -> np.ndarray:
        """The rows of each global batch of an epoch."""
        sizes = np.full(self.steps, self.batch_size)
        sizes[-1] = self.rows - (self.steps - 1) * self.batch_size
        return sizes

    def epoch(self, number: int) -> Iterator[Batch]:
        """This rank's shares of all batches of epoch `number`."""
        visited = order(self.rows, self._seed, number, self._shuffle)
        for start in range(0, self.rows, self.batch_size):
            batch = visited[start : start + self.batch_size]
            mine = batch[chunk(batch.size, self._ranks, self._rank)]
            x, y = self._x_batch[: mine.size], self._y_batch[: mine.size]
            self._x.take(mine, axis=0, out=x, mode="clip")  # "raise" would go through a buffer
            self._y.take(mine, axis=0, out=y, mode="clip")
            yield Batch(x, y, batch.size, mine.size / batch.size)
