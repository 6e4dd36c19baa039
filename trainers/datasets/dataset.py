"""A data set: how it is split, checked and scaled."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainers.datasets.columns import Columns
from trainers.errors import DataError

TEST_PART = 5  # every fifth sample is for testing
SPLIT_SEED = 47  # see README.md in this folder
PIXELS = 0.0, 1 / 255  # shift and scale of bytes
MANY_CLASSES = 1000  # a label above this, and above the number of rows, is not a class number


@dataclass(frozen=True)
class Dataset:
    """Samples and labels, split into a training and a test set.

    x_train, x_test: (rows, features), raw numbers of the file.
    y_train, y_test: (rows,) int64 class numbers, 0 to len(classes) - 1.
    shift, scale: (x - shift) * scale is the input of a network; numbers, or one per feature, from the training set.
    columns: of a table with a label by name: what was learned of its columns. x is float32 then, and scaled already.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    shift: np.ndarray | float
    scale: np.ndarray | float
    columns: Columns | None = None

    @property
    def features(self) -> int:
        return self.x_train.shape[1]

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.x_train)} samples to train, {len(self.x_test)} to test, "
            f"{self.features} features, {len(self.classes)} classes"
        )


def numbers(count: int) -> tuple[str, ...]:
    """Return the names of `count` classes that have only numbers."""
    return tuple(map(str, range(count)))


class Rows(NamedTuple):
    """The rows of a file, divided into a part to train and a part to test: x (rows, features), y (rows,) int64."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def divided(cls, x: np.ndarray, y: np.ndarray) -> "Rows":
        """Split off a fifth of the rows to test."""
        tested = split(y)
        return cls(x[~tested], y[~tested], x[tested], y[tested])


def make(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Dataset:
    """Check the arrays and make a Dataset; without a test set, split off a fifth of the samples. Raises DataError."""
    sets = [checked(name, *train)]
    sets += [checked(f"{name} (test)", *test)] if test else []
    if test is None:
        x, y = sets[0]
        if len(x) < 2:
            raise DataError(f"{name} has one sample; at least 2 are needed, to train and to test")
        x_train, y_train, x_test, y_test = Rows.divided(x, y)
    else:
        (x_train, y_train), (x_test, y_test) = sets
    if x_train.shape[1] != x_test.shape[1]:
        raise DataError(f"{name}: training has {x_train.shape[1]} features and test {x_test.shape[1]}")
    if classes is None:
        classes = numbers(int(max(y_train.max(), y_test.max())) + 1)
    return Dataset(name, x_train, y_train, x_test, y_test, classes, *scaling(x_train))


def split(y: np.ndarray) -> np.ndarray:
    """Return a mask of the test rows, (rows,) bool: a fifth of every class, the same rows at every call."""
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(y))
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    count = -(-len(y) // TEST_PART)
    tested = np.zeros(len(y), bool)
    tested[by_class[np.arange(count) * len(y) // count]] = True
    return tested


def checked(name: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return samples as (rows, features), and labels as int64 class numbers. Raises DataError."""
    if x.ndim < 1 or len(x) == 0 or x.size == 0:
        raise DataError(f"{name} is empty: x has shape {x.shape}")
    if x.dtype.kind not in "iufb" or y.dtype.kind not in "iuf":
        raise DataError(f"{name} is not numeric: x is {x.dtype}, y is {y.dtype}")
    if y.ndim != 1 or len(y) != len(x):
        hint = "; for one-hot labels store y.argmax(axis=1)" if y.ndim == 2 else ""
        raise DataError(f"{name} has {len(x)} samples and labels of shape {y.shape}; expected ({len(x)},){hint}")
    flat = x.reshape(len(x), -1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        row, column = np.argwhere(~np.isfinite(flat))[0]
        raise DataError(f"{name}: sample {row}, feature {column} is {flat[row, column]}; every feature must be finite")
    wrong = np.flatnonzero((y < 0) | (y != np.floor(y)) | (y > max(MANY_CLASSES, len(y))) | ~np.isfinite(y))
    if wrong.size:
        raise DataError(
            f"{name}: the label of sample {wrong[0]} is {y[wrong[0]]}; labels must be class numbers 0, 1, ... "
            "(in a CSV file the label is the last column)"
        )
    return flat, y.astype(np.int64)


def scaling(x: np.ndarray) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return shift and scale: bytes are pixels, divided by 255; other features get mean 0, standard deviation 1."""
    if x.dtype == np.uint8:
        return PIXELS
    mean, deviation = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    return standardized(mean, deviation)


def standardized(mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return shift and scale for features of this mean and deviation."""
    deviation = np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation)  # never changes, as far as float32 can tell
    return mean.astype(np.float32), (1 / deviation).astype(np.float32)
