"""The argument `class_weight` of fit: weights of rows that follow from the class of each row."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.arguments import is_integer, is_number
from trainers.data import Data
from trainers.errors import ArgumentError

BALANCED = "balanced"


class ClassWeights:
    """Weighs rows by their class, in addition to the weights that they have.

    given: class number -> weight, or "balanced"; see Trainer.fit. Not checked.
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def __str__(self) -> str:
        given = self._given
        return str({key: given[key] for key in sorted(given, key=str)} if isinstance(given, Mapping) else given)

    def check(self, arrays: bool) -> None:
        """Raise ArgumentError if the argument is invalid. arrays: whether all rows are given, as arrays."""
        given = self._given
        if isinstance(given, str) and given == BALANCED:
            if not arrays:
                raise ArgumentError(
                    f'class_weight="{BALANCED}" counts the rows of each class, so it needs arrays x and y: with a data '
                    "set or a loader give a weight for each class, such as class_weight={0: 1.0, 1: 5.0}"
                )
            return
        valid = isinstance(given, Mapping) and all(
            is_integer(key) and is_number(value) and value >= 0 for key, value in given.items()
        )
        if not valid or not any(given.values()):
            raise ArgumentError(
                f'class_weight must be "{BALANCED}", or numbers >= 0 for class numbers, such as {{0: 1.0, 1: 5.0}}, '
                f"not {given!r}"
            )

    def of_all(self, data: Data) -> Data:
        """Return all rows of a training with their weights. Raises ArgumentError, also if no row has a class that has a
        weight."""
        labels = _labels(data[1])
        classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if not isinstance(self._given, Mapping):
            return _weighted(data, (len(labels) / (len(classes) * counts))[inverse])
        if unknown := sorted(set(self._given) - set(classes.tolist())):
            shown = ", ".join(map(str, classes[:10].tolist())) + (", ..." if len(classes) > 10 else "")
            raise ArgumentError(f"class_weight has a weight for class {unknown[0]}, and y has the classes {shown}")
        return self(data)

    def __call__(self, data: Data) -> Data:
        """Return rows of a data set or of a loader with their weights. Raises ArgumentError."""
        labels = _labels(data[1])
        weights = np.ones(len(labels))
        for key, value in self._given.items():
            weights[labels == key] = value
        return _weighted(data, weights)


def _weighted(data: Data, weights: np.ndarray) -> Data:
    x, y, *own = data
    return x, y, *(weights * each for each in own or [np.ones(1)])


def _labels(y: Any) -> np.ndarray:
    """Return the class number of each row: of integers, or of one-hot rows. Raises ArgumentError."""
    if isinstance(y, np.ndarray) and y.ndim == 2 and y.shape[1] > 1:
        if ((y != 0) & (y != 1)).any() or (y.sum(axis=1) != 1).any():
            raise ArgumentError("class_weight needs y of class numbers or one-hot rows, and a row of y is not one-hot")
        return y.argmax(axis=1)
    if not isinstance(y, np.ndarray) or y.size != len(y) or y.dtype.kind not in "iubf" or (y != np.rint(y)).any():
        found = f"{y.dtype} of shape {y.shape}" if isinstance(y, np.ndarray) else f"a {type(y).__name__}"
        raise ArgumentError(f"class_weight needs y of class numbers, one for each row, or one-hot, not {found}")
    return y.reshape(-1).astype(np.int64)
