"""The rows of each member of an ensemble: all, a bootstrap sample, or a shard. No MPI."""

from typing import Any

import numpy as np

from allreduce.elastic.ranks import chunk
from trainers.data import Arrays, Samples, seed_of
from trainers.errors import ArgumentError
from trainers.options.loader import Loader

BAGGINGS = (None, "rows", "shards")


class DrawnRows:
    """Draws the rows of members. They depend on the seed, on the member and on the number of rows, and on nothing else.

    bagging: None: all rows. "rows": as many as there are, with replacement. "shards": each row belongs to one member.
    """

    def __init__(self, bagging: str | None, seed: int, members: int, rows: int) -> None:
        self._bagging, self._seed, self._members, self._rows = bagging, seed, members, rows
        if bagging == "shards" and rows < members:
            raise ArgumentError(f'bagging="shards": {rows} rows for {members} members; each needs one at least')

    def of(self, member: int) -> np.ndarray | None:
        """Return the numbers of a member's rows, in ascending order; None for all rows."""
        if self._bagging is None:
            return None
        if self._bagging == "rows":
            generator = np.random.default_rng(seed_of(self._seed, member, 1))
            return np.sort(generator.integers(self._rows, size=self._rows))
        order = np.random.default_rng(seed_of(self._seed, 2)).permutation(self._rows)
        return np.sort(order[chunk(self._rows, self._members, member)])

    def unseen(self, member: int) -> np.ndarray:
        """Return the numbers of the rows that a member does not train on."""
        left = np.ones(self._rows, bool)
        left[slice(None) if (rows := self.of(member)) is None else rows] = False
        return np.flatnonzero(left)


class RowsOf:
    """Some rows of a data set, as a data set."""

    def __init__(self, data: Any, rows: np.ndarray) -> None:
        self._data, self._rows = data, rows
        if hasattr(data, "__getitems__"):
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Any:
        return self._data[int(self._rows[place])]

    def _several(self, places: Any) -> Any:
        return self._data.__getitems__([int(self._rows[place]) for place in places])


def taken(given: Arrays | Samples, drawn: DrawnRows, prefetch: bool | None, member: int) -> Loader:
    """Return the rows of a member: copies, or a data set. given: all rows."""
    rows, data = drawn.of(member), given.data
    if isinstance(given, Samples):
        return Loader(given if rows is None else Samples(RowsOf(data, rows), given.collate), prefetch=prefetch)
    return Loader(data if rows is None else given.take(rows), prefetch=prefetch)
