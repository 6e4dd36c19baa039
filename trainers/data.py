"""Which rows a rank sees: the same seeded permutation on every rank, and every rank's share of each batch.

A batch is global. Batch s of an epoch is rows order[s * B : (s + 1) * B]; rank r takes the r-th chunk of
it. So the batches do not depend on the number of ranks; the last may be short, and a rank may have no row.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from allreduce.arrays.chunks import chunk
from trainers import fingerprint
from trainers.fingerprint import Fingerprint
from trainers.samples import Samples


def order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch (0, 1, ...) visits the rows; (rows,) int64, a function of its arguments alone."""
    if not shuffle:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Batch(NamedTuple):
    """A rank's share of one global batch; the arrays are overwritten by a later batch."""

    x: np.ndarray
    y: np.ndarray
    rows: int  # in the global batch
    share: float  # this rank's rows / rows


class Batches:
    """The shares of one rank, epoch by epoch.

    x, y: the whole data, the same on every rank (memory maps will do); or `Samples`, and None.
    batch_size: rows in a global batch.
    part, parts: every batch is cut into so many, and the shares are that one; None for shares without rows.
    ahead: how many batches may be fetched before they are asked for; so long a batch's arrays stay as they are.
    """

    def __init__(
        self,
        x: Any,
        y: np.ndarray | None,
        batch_size: int,
        part: int | None,
        parts: int,
        seed: int = 0,
        shuffle: bool = True,
        ahead: int = 0,
    ) -> None:
        self.rows, self.batch_size = len(x), min(batch_size, len(x))
        self._x, self._y, self._ahead = x, y, ahead
        self._seed, self._shuffle = seed, shuffle
        self.checked = not isinstance(x, Samples)  # all rows could be checked before
        self.divide(part, parts)

    def divide(self, part: int | None, parts: int) -> None:
        """From now on every batch is cut into so many parts, and the shares are this one."""
        self._part, self._parts = part, parts
        most = -(-self.batch_size // parts)
        x = self._x
        self._source = x if isinstance(x, Samples) else _Arrays(x, self._y, most, self._ahead + 1)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides which rows are in which batch."""
        rows, size = int(self.rows), int(self.batch_size)
        return {"rows": rows, "batch_size": size, "seed": int(self._seed), "shuffle": bool(self._shuffle)}

    def fingerprint(self) -> Fingerprint:
        """What tells these data from others; see trainers.fingerprint. Raises DataError."""
        return fingerprint.take(self._x, self._y)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-self.rows // self.batch_size)

    def sizes(self) -> np.ndarray:
        """The rows of each global batch of an epoch."""
        sizes = np.full(self.steps, self.batch_size)
        sizes[-1] = self.rows - (self.steps - 1) * self.batch_size
        return sizes

    def epoch(self, number: int, first: int = 0) -> Generator[Batch]:
        """This rank's shares of the batches of epoch `number`, from `first` on. Raises DataError."""
        visited = self.order(number)
        for step in range(first, self.steps):
            yield self.share(visited, step, self._part)

    def order(self, number: int) -> np.ndarray:
        """The rows in the order of epoch `number`."""
        return order(self.rows, self._seed, number, self._shuffle)

    def share(self, visited: np.ndarray, step: int, part: int | None) -> Batch:
        """A part of batch `step` of an epoch that visits the rows in this order. Raises DataError."""
        batch = visited[step * self.batch_size : (step + 1) * self.batch_size]
        mine = batch[:0] if part is None else batch[chunk(batch.size, self._parts, part)]
        x, y = self._source.take(mine)
        return Batch(x, y, batch.size, mine.size / batch.size)


class _Arrays:
    """Rows of arrays, copied into memory that is used again after `sets` calls.

    most: rows that are taken at once.
    """

    def __init__(self, x: np.ndarray, y: Any, most: int, sets: int) -> None:
        self._x, self._y = x, y
        self._sets = [
            (np.empty((most, *x.shape[1:]), x.dtype), np.empty((most, *y.shape[1:]), y.dtype)) for _ in range(sets)
        ]
        self._turn = 0

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = (array[: rows.size] for array in self._sets[self._turn % len(self._sets)])
        self._turn += 1
        self._x.take(rows, axis=0, out=x, mode="clip")  # "raise" would go through a buffer
        self._y.take(rows, axis=0, out=y, mode="clip")
        return x, y
