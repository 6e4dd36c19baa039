"""Map-style data sets: anything with len() and rows by number (a torch Dataset, a Hugging Face Dataset, ...)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainers.errors import ArgumentError, DataError

Collate = Callable[[Sequence[Any]], Any]


class Samples:
    """A data set whose rows are fetched when they are needed.

    data: len(data) is the number of rows, and data[i] is row i, a pair (x, y).
    collate: makes (x, y), arrays whose first axis is the sample, of a list of rows; by default the x and the y
        of the rows are stacked. Rows that are no pairs need one of your own.

    Rows come from `data.__getitems__(list of numbers)` where there is one (PyTorch's protocol); else, without
    a collate, from data[array of numbers] where that gives the same (x, y) as row by row; else row by row.
    Raises ArgumentError.
    """

    def __init__(self, data: Any, collate: Collate | None = None) -> None:
        self.name = type(data).__name__
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ArgumentError(
                f"x is a {self.name}, and there is no y: give arrays x and y, or a data set with len() and rows by "
                "number (of a DataLoader its .dataset)"
            )
        self._data, self._collate = data, collate or _stack
        self._rows = len(data)
        if self._rows == 0:
            raise ArgumentError(f"there are no samples: the {self.name} is empty")
        self._fetch = self._one_by_one
        try:
            probe = np.array([0, self._rows - 1])
            x, y = self.first = self.take(probe)
        except DataError as error:
            raise ArgumentError(str(error)) from error
        if collate is None and not hasattr(data, "__getitems__") and self._takes_arrays(probe):
            self._fetch = self._at_once
        self._none = x[:0], y[:0]

    def __len__(self) -> int:
        return self._rows

    def __str__(self) -> str:
        sides = ", ".join(
            f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in zip("xy", self.first, strict=True)
        )
        return f"{self.name} of {self._rows} rows, {sides}"

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x and y of these rows. Raises DataError, which names the data set and what it raised."""
        if rows.size == 0:
            return self._none
        try:
            x, y = (np.asarray(side) for side in self._fetch(rows))
        except Exception as error:
            raise DataError(f"the {self.name} can't give rows {_shown(rows)}: {_reason(error)}") from error
        if not (x.ndim and y.ndim and len(x) == len(y) == rows.size):
            raise DataError(
                f"the {self.name} gave x of shape {x.shape} and y of shape {y.shape} for {rows.size} rows; their first "
                "axes must be the samples"
            )
        return x, y

    def _one_by_one(self, rows: np.ndarray) -> Any:
        numbers = rows.tolist()
        several = getattr(self._data, "__getitems__", None)
        return self._collate(several(numbers) if several else [self._data[number] for number in numbers])

    def _at_once(self, rows: np.ndarray) -> Any:
        return self._data[rows]

    def _takes_arrays(self, probe: np.ndarray) -> bool:
        """Whether rows by an array of numbers are the rows one by one; a random augmentation shows that it is not."""
        try:
            x, y = (np.asarray(side) for side in self._at_once(probe))
            return all(
                there.dtype == here.dtype and np.array_equal(there, here)
                for there, here in zip((x, y), self.first, strict=True)
            )
        except Exception:  # whatever it raises, it takes no arrays
            return False


def _stack(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise TypeError(f"a row is a {type(row).__name__}, not a pair (x, y); pass collate= to make pairs")
    return np.stack([np.asarray(x) for x, _ in rows]), np.stack([np.asarray(y) for _, y in rows])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _shown(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return f"{shown}, ... ({rows.size} of them)" if rows.size > 5 else shown
