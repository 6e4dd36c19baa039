"""Columns: what training has learned of the columns of a table, to make numbers of its rows. JSON types, no files."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainers.datasets.rows import Cells, is_number, shown
from trainers.errors import DataError

MISSING = frozenset(("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"))
ONE_HOT = 32  # a category of more values is embedded
MOST_VALUES = 1 << 16  # of a category, and of the label
MOST_FEATURES = 1 << 20
LONGEST_VECTOR = 32
SHOWN = 8  # names in one message

Where = Callable[[int], str]  # the path and the line of a row, for a message


@dataclass(frozen=True)
class Number:
    """A column of numbers. Its feature is (x - mean) * scale; a missing value gets the mean, so its feature is 0.

    missing: whether training has met missing values. A second feature then is 1 where the value is missing, else 0.
    """

    name: str
    mean: float
    scale: float
    missing: bool

    @property
    def width(self) -> int:
        return 1 + self.missing

    def write(self, x: np.ndarray, values: np.ndarray) -> None:
        """Write the features, (rows, width). values: numbers, NaN where missing."""
        absent = np.isnan(values)
        x[:, 0] = np.where(absent, 0, (values - self.mean) * self.scale)
        if self.missing:
            x[:, 1] = absent

    def read(self, x: np.ndarray) -> np.ndarray:
        """Return the values of features, the inverse of `write`."""
        values = x[:, 0].astype(np.float64) / self.scale + self.mean
        return np.where(x[:, 1] > 0.5, np.nan, values) if self.missing else values


@dataclass(frozen=True)
class Category:
    """A column of categories. Up to 32 values have a feature each, 1 for the row's value (one-hot). More values have
    one feature, the number of the value, whose vector a network learns (an embedding).

    values: of the training rows; the number of a value is its place here plus 1. Missing values, and values that
    training has not met, have number 0: their one-hot features are all 0.
    """

    name: str
    values: tuple[str, ...]

    def numbered(self) -> dict[str, int]:
        return {value: number for number, value in enumerate(self.values, 1)}

    @property
    def embedded(self) -> bool:
        return len(self.values) > ONE_HOT

    @property
    def vector(self) -> int:
        """The length of a value's vector, if the category is embedded."""
        return min(LONGEST_VECTOR, math.isqrt(len(self.values) - 1) + 1)

    @property
    def width(self) -> int:
        return 1 if self.embedded else len(self.values)

    def write(self, x: np.ndarray, numbers: np.ndarray) -> None:
        """Write the features, (rows, width). numbers: of the values."""
        if self.embedded:
            x[:, 0] = numbers
            return
        x[:] = 0
        known = np.flatnonzero(numbers)
        x[known, numbers[known] - 1] = 1

    def read(self, x: np.ndarray) -> np.ndarray:
        """Return the numbers of the values of features, the inverse of `write`."""
        if self.embedded:
            return x[:, 0].astype(np.int64)
        if not x.shape[1]:
            return np.zeros(len(x), np.int64)
        return np.where(x.max(axis=1) > 0.5, x.argmax(axis=1) + 1, 0)


class Embedded(NamedTuple):
    """An embedded category. rows: of its table, one for each value and one for all others. vector: length of a row."""

    rows: int
    vector: int


class Columns:
    """What training has learned of a table: the columns in their order, the label and its classes.

    columns: the columns that are features, in the order of the table. label: the name of the label's column.
    classes: the labels in words, by class number. ignored: names of columns that are not used.

    A row becomes `features` float32 numbers: first the features of numbers and one-hot categories in the order of the
    columns, then the numbers of the embedded categories. Attributes: features; embedded, for each embedded category.
    """

    def __init__(
        self, columns: Sequence[Number | Category], label: str, classes: Sequence[str], ignored: Sequence[str] = ()
    ) -> None:
        self.columns, self.label, self.classes, self.ignored = tuple(columns), label, tuple(classes), tuple(ignored)
        kept = [column for column in self.columns if isinstance(column, Category) and column.embedded]
        self.embedded = tuple(Embedded(len(column.values) + 1, column.vector) for column in kept)
        order = [column for column in self.columns if column not in kept] + kept
        ends = itertools.accumulate((column.width for column in order), initial=0)
        spans = dict(
            zip((column.name for column in order), itertools.starmap(slice, itertools.pairwise(ends)), strict=True)
        )
        self._spans = [spans[column.name] for column in self.columns]
        self.features = sum(column.width for column in self.columns)
        self._numbers = [column.numbered() if isinstance(column, Category) else {} for column in self.columns]
        self._class_numbers = {name: number for number, name in enumerate(self.classes)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.columns, self.label, self.classes))

    def __str__(self) -> str:
        numbers = sum(isinstance(column, Number) for column in self.columns)
        return (
            f"{numbers} column{'s' * (numbers != 1)} of numbers, {len(self.columns) - numbers} of categories "
            f"({len(self.embedded)} embedded), label {self.label!r}"
        )

    def agrees_with(self, other: "Columns") -> bool:
        """Whether both make the same features and class numbers of a row, apart from rounding."""
        if (self.label, self.classes, len(self.columns)) != (other.label, other.classes, len(other.columns)):
            return False
        return all(map(_alike, self.columns, other.columns))

    # Rows

    def places(self, path: str, names: Sequence[str]) -> tuple[list[int], int | None]:
        """Return the places of the columns in a table with these names, and the place of the label if it is there.
        Raises DataError if the columns are not those of training, in their order."""
        expected = [column.name for column in self.columns]
        found = [name for name in names if name != self.label and name not in self.ignored]
        if found != expected:
            raise DataError(
                f"{path}: its columns are {_listed(found)}, and this model was trained on {_listed(expected)}"
            )
        return [names.index(name) for name in expected], names.index(self.label) if self.label in names else None

    def encode(self, cells: Sequence[Cells], where: Where, unknown: dict[str, int] | None = None) -> np.ndarray:
        """Return the features of rows, (rows, features) float32.

        cells: of each column, in the order of `columns`. where: names a row in an error. unknown: counts, by column,
            values of categories that training has not met.
        """
        values = []
        for column, given, index in zip(self.columns, cells, self._numbers, strict=True):
            if isinstance(column, Number):
                values.append(numbers(column.name, given, where))
                continue
            values.append(known(given, index))
            if unknown is not None:
                strange = sum(is_value(given[row]) for row in np.flatnonzero(values[-1] == 0).tolist())
                if strange:
                    unknown[column.name] = unknown.get(column.name, 0) + strange
        return self.features_of(values, where)

    def features_of(self, values: Sequence[np.ndarray], where: Where) -> np.ndarray:
        """Return the features of rows. values: of each column, as `write` of the columns takes them. Raises DataError
        for a number that is too large."""
        x = np.empty((len(values[0]), self.features), np.float32)
        for column, each, span in zip(self.columns, values, self._spans, strict=True):
            with np.errstate(over="ignore"):
                column.write(x[:, span], each)
            if isinstance(column, Number) and not np.isfinite(x[:, span]).all():
                row = int(np.argmin(np.isfinite(x[:, span]).all(axis=1)))
                raise DataError(
                    f"{where(row)}, column {shown(column.name)}: {each[row]:g} is too large: in training the mean was "
                    f"{column.mean:g}, and the deviation {1 / column.scale:g}"
                )
        return x

    def values_of(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the values of each column, float64 numbers or numbers of categories: the inverse of `features_of`."""
        return [column.read(x[:, span]) for column, span in zip(self.columns, self._spans, strict=True)]

    def labels(self, cells: Cells, where: Where) -> np.ndarray:
        """Return the class numbers of labels, (rows,) int64. Raises DataError for a label that training has not met."""
        try:
            return np.array([self._class_numbers[cell.strip()] for cell in cells], np.int64)
        except KeyError as error:
            unknown = error.args[0]
        row = next(row for row, cell in enumerate(cells) if cell.strip() == unknown)
        if unknown in MISSING:
            raise DataError(f"{where(row)} has no label in the column {shown(self.label)}; leave such rows out")
        raise DataError(
            f"{where(row)}: training has not met the label {shown(unknown)}; its labels are {_listed(self.classes)}"
        )

    # Files

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "columns": [
                {"name": column.name, "mean": column.mean, "scale": column.scale, "missing": column.missing}
                if isinstance(column, Number)
                else {"name": column.name, "values": list(column.values)}
                for column in self.columns
            ],
            "label": self.label,
            "classes": list(self.classes),
            "ignored": list(self.ignored),
        }

    @classmethod
    def from_dict(cls, given: Any) -> "Columns":
        """Return the Columns of an `as_dict`. Raises ValueError if it is none."""
        try:
            columns = [_column(each) for each in given["columns"]]
            label, classes, ignored = given["label"], given["classes"], given["ignored"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"it describes no columns: {error!r}") from error
        texts = [[column.name for column in columns] + [label], classes, ignored]
        if not all(map(_are_texts, texts)) or not columns or not classes or len(columns) + len(classes) > MOST_FEATURES:
            raise ValueError("it describes no columns: names that are no texts, or that are not unique")
        made = cls(columns, label, classes, ignored)
        if made.features > MOST_FEATURES:
            raise ValueError(f"it describes {made.features} features; the most are {MOST_FEATURES}")
        return made


def numbers(name: str, cells: Cells, where: Where) -> np.ndarray:
    """Return the numbers of a column, float64, NaN for missing values. Raises DataError."""
    try:
        values = np.array(list(map(float, cells)))
    except ValueError:
        try:
            values = np.array(
                [math.nan if cell in MISSING or cell.strip() in MISSING else float(cell) for cell in cells]
            )
        except ValueError:
            raise _wrong_number(name, cells, where) from None
    if "_" in "".join(cells) or np.isinf(values).any():
        raise _wrong_number(name, cells, where)
    return values


def _wrong_number(name: str, cells: Cells, where: Where) -> DataError:
    row, cell = next(
        (row, cell)
        for row, cell in enumerate(cells)
        if cell.strip() not in MISSING and not (is_number(cell) and not math.isinf(float(cell)))
    )
    return DataError(
        f"{where(row)}, column {shown(name)}: {shown(cell)} is not a finite number, as the others of this column are; "
        "leave the cell empty if the value is missing"
    )


def known(cells: Cells, index: Mapping[str, int]) -> np.ndarray:
    """Return the numbers of a category's values; 0 for missing and unknown ones."""
    get = index.get
    found = np.array([get(cell, 0) for cell in cells], np.int64)
    for row in np.flatnonzero(found == 0).tolist():  # with spaces around them, perhaps
        found[row] = get(cells[row].strip(), 0)
    return found


def is_value(cell: str) -> bool:
    return cell.strip() not in MISSING


def _alike(one: Number | Category, other: Number | Category) -> bool:
    if not isinstance(one, Number) or not isinstance(other, Number):
        return one == other
    same = (one.name, one.missing) == (other.name, other.missing) and math.isclose(one.scale, other.scale, rel_tol=1e-6)
    return same and abs(one.mean - other.mean) * one.scale < 1e-6


def _column(given: Mapping[str, Any]) -> Number | Category:
    if "values" in given:
        values = given["values"]
        if not _are_texts(values) or len(values) > MOST_VALUES:
            raise ValueError("the values of a category are not unique texts")
        return Category(given["name"], tuple(values))
    mean, scale, missing = given["mean"], given["scale"], given["missing"]
    finite = all(type(each) in (int, float) and abs(each) < 1e308 for each in (mean, scale))
    if not finite or not isinstance(missing, bool):
        raise ValueError("the mean or the scale of a column is not a finite number")
    return Number(given["name"], float(mean), float(scale), missing)


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, str) for each in given) and len({*given}) == len(given)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(shown, names[:SHOWN])) + more
