"""Learns the columns of tables from their training rows, and reads the rows. The tables may be divided among ranks.

No MPI here: an `Exchange` brings together what the ranks have found in their own files.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainers.datasets import dataset
from trainers.datasets.columns import MISSING, MOST_VALUES, Category, Columns, Number, Where, numbers
from trainers.datasets.dataset import Rows
from trainers.datasets.rows import Block, Cells, TableFile, is_number, shown
from trainers.errors import DataError

# calls a function on every rank and returns the results of all, JSON types; raises the error of one rank on all
Exchange = Callable[[Callable[[], Any]], list[Any]]


def alone(step: Callable[[], Any]) -> list[Any]:
    """The Exchange of a process that has all files."""
    return [step()]


class Moments(NamedTuple):
    """count: of numbers. mean: of them. squares: the sum of the squared differences from the mean. Also of features."""

    count: Any
    mean: Any
    squares: Any

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Return the moments over the first axis, in float64; NaN are left out."""
        values = values.astype(np.float64, copy=False)
        present = ~np.isnan(values)
        count = present.sum(axis=0)
        with np.errstate(all="ignore"):
            mean = np.where(present, values, 0).sum(axis=0) / np.maximum(count, 1)
            squares = np.where(present, (values - mean) ** 2, 0).sum(axis=0)
        return cls(count, mean, squares)

    def __add__(self, other: Any) -> "Moments":
        """Return the moments of both: T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm for
        computing sample variances, 1979."""
        count = self.count + other.count
        with np.errstate(all="ignore"):
            part = other.count / np.maximum(count, 1)
            step = other.mean - self.mean
            squares = self.squares + other.squares + step * step * self.count * part
            return Moments(count, self.mean + step * part, squares)

    @property
    def deviation(self) -> Any:
        with np.errstate(all="ignore"):
            return np.sqrt(self.squares / np.maximum(self.count, 1))


@dataclass(frozen=True)
class Choices:
    """How a table is read. label: the name of its label. ignore: columns that are not used. categories: columns whose
    numbers are categories."""

    label: str
    ignore: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


class Values(dict[str, int]):
    """Numbers different texts in the order of their appearance, from 1; missing values are 0."""

    def __init__(self, missing: Collection[str] = MISSING) -> None:
        super().__init__(dict.fromkeys(missing, 0))
        self._missing = len(missing)

    @property
    def texts(self) -> list[str]:
        return list(self)[self._missing :]

    def add(self, cells: Cells) -> np.ndarray:
        base, number_of = self._missing - 1, self.setdefault
        return np.array([number_of(cell.strip(), len(self) - base) for cell in cells], np.int64)

    def renumbered(self, index: Mapping[str, int]) -> np.ndarray:
        """Return the number in `index` for each number of here, 0 if it has none."""
        return np.array([0] + [index.get(text, 0) for text in self.texts], np.int64)


class Read(NamedTuple):
    """The rows of one table, by column. values: numbers, NaN where missing, or the numbers of `texts`."""

    values: dict[str, np.ndarray]
    texts: dict[str, Values]
    labels: np.ndarray
    classes: Values


def read(table: TableFile, names: Sequence[str], categories: Collection[str], label: str) -> Read:
    """Read all rows of these columns, and the label. Raises DataError."""
    texts: dict[str, Values] = {name: Values() for name in names if name in categories}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    labels: list[np.ndarray] = []
    classes = Values()
    for block in table.blocks():
        where = place(table, block)
        for name in names:
            cells = block.columns[table.names.index(name)]
            found = texts[name].add(cells) if name in texts else numbers(name, cells, where)
            parts[name].append(found)
            if name in texts and len(texts[name].texts) > MOST_VALUES:
                raise too_many_error(table.path, name)
        labels.append(classes.add(block.columns[table.names.index(label)]))
        if not labels[-1].all():
            row = int(np.argmin(labels[-1]))
            raise DataError(f"{where(row)} has no label in the column {shown(label)}; leave such rows out")
        if len(classes.texts) > MOST_VALUES:
            raise DataError(f"{table.path}: the label {shown(label)} has more than {MOST_VALUES} different values")
    none = np.zeros(0, np.int64)
    values = {name: np.concatenate(part) if part else none for name, part in parts.items()}
    return Read(values, texts, np.concatenate(labels) if labels else none, classes)


def too_many_error(source: str, name: str) -> DataError:
    return DataError(
        f"{source}: the column {shown(name)} has more than {MOST_VALUES} different values; leave it out "
        f"(ignore={name!r}, --ignore {name})"
    )


def place(table: TableFile, block: Block) -> Where:
    return lambda row: f"{table.path}, line {block.lines[row]}"


def learn(
    source: str, tables: Mapping[int, TableFile], choices: Choices, exchange: Exchange
) -> tuple[Columns, dict[int, Rows]]:
    """Learn the columns of all tables, and read those of this rank. Collective if `exchange` is.

    source: names the tables in errors. tables: of this rank, by their numbers among the tables of all ranks. Raises
    DataError on all ranks.
    """
    names = _agreed_names(tables, choices, exchange)
    used = [name for name in names if name != choices.label and name not in choices.ignore]
    scanned = exchange(lambda: sorted(set[str]().union(*[_texts_in(each, used) for each in tables.values()])))
    categories = {*choices.categories}.union(*scanned)

    held: dict[int, Read] = {}

    def read_all() -> list[list[str]]:
        held.update({number: read(table, used, categories, choices.label) for number, table in tables.items()})
        return [each.classes.texts for each in held.values()]

    labels = {text for rank in exchange(read_all) for texts in rank for text in texts}
    classes = class_names(source, choices.label, labels)
    order = {name: number for number, name in enumerate(classes)}

    def describe() -> dict[str, Any]:
        parts = {number: dataset.split(_class_numbers(each, order)) for number, each in held.items()}
        return {str(number): _described(each, ~parts[number]) for number, each in held.items()}

    found = {int(number): each for rank in exchange(describe) for number, each in rank.items()}
    described = [found[number] for number in sorted(found)]
    columns = _columns(source, used, categories, described, choices, classes)
    rows: dict[int, Rows] = {}

    def encode() -> None:
        for number, each in held.items():
            x = _features(tables[number].path, columns, each)
            rows[number] = Rows.divided(x, _class_numbers(each, order))

    exchange(encode)
    return columns, rows


def load(table: TableFile, columns: Columns) -> Rows:
    """Read the rows of a table as the columns say. Raises DataError, also for labels that training has not met."""
    places, label = columns.places(table.path, table.names)
    if label is None:
        raise DataError(f"{table.path} has no column {shown(columns.label)}, the label")
    x, y = [np.empty((0, columns.features), np.float32)], [np.empty(0, np.int64)]
    for block in table.blocks():
        where = place(table, block)
        x.append(columns.encode([block.columns[at] for at in places], where))
        y.append(columns.labels(block.columns[label], where))
    return Rows.divided(np.concatenate(x), np.concatenate(y))


def _agreed_names(tables: Mapping[int, TableFile], choices: Choices, exchange: Exchange) -> list[str]:
    """Return the names of the columns, which all tables share, after a check of `choices`."""
    everyone = exchange(lambda: {str(number): [each.path, each.names] for number, each in tables.items()})
    found = {int(number): each for rank in everyone for number, each in rank.items()}
    (first, names), *others = [found[number] for number in sorted(found)]
    for path, those in others:
        if list(those) != list(names):
            raise DataError(f"{path} has the columns {', '.join(those)}, and {first} has {', '.join(names)}")
    for name in (choices.label, *choices.ignore, *choices.categories):
        if name not in names:
            raise DataError(f"{first} has no column {shown(name)}; its columns are {', '.join(names)}")
    if choices.label in choices.ignore or len(names) < 2 + len({*choices.ignore}):
        raise DataError(f"{first}: no column is left besides the label {shown(choices.label)}")
    return list(names)


def _texts_in(table: TableFile, names: Sequence[str]) -> set[str]:
    """Return the names of the columns that have a cell that is neither a number nor missing."""
    found: set[str] = set()
    for block in table.blocks():
        for name in names:
            cells = block.columns[table.names.index(name)]
            if name not in found and not _all_numbers(cells):
                found.add(name)
    return found


def _all_numbers(cells: Cells) -> bool:
    try:
        numbers("", cells, lambda _: "")
    except DataError:
        return all(cell.strip() in MISSING or is_number(cell) for cell in cells)  # an infinity is an error elsewhere
    return True


def class_names(source: str, label: str, texts: Collection[str]) -> list[str]:
    """Return the names of classes in order: words alphabetically, numbers by their size. Raises DataError."""
    if not texts:
        raise DataError(f"{source}: there are no rows, only a header")
    if not all(map(is_number, texts)):
        return sorted(texts)
    ordered = sorted(texts, key=lambda text: (float(text), text))
    for one, other in itertools.pairwise(ordered):
        if float(one) == float(other):
            raise DataError(
                f"{source}: the label {shown(label)} has the number {one} also as {other}; write it one way"
            )
    if len(texts) > dataset.MANY_CLASSES or any(not float(text).is_integer() for text in texts):
        raise DataError(
            f"{source}: the label {shown(label)} has {len(texts)} different numbers, such as {min(texts)}; expected "
            f"classes: words, or at most {dataset.MANY_CLASSES} whole numbers"
        )
    return ordered


def _class_numbers(found: Read, order: Mapping[str, int]) -> np.ndarray:
    return np.array([-1] + [order[text] for text in found.classes.texts], np.int64)[found.labels]


def _described(found: Read, trained: np.ndarray) -> dict[str, Any]:
    """Return what the training rows of a table tell about its columns, JSON types."""
    described: dict[str, Any] = {"rows": int(trained.sum())}
    for name, values in found.values.items():
        own = values[trained]
        if name in found.texts:
            texts = found.texts[name].texts
            described[name] = [texts[number - 1] for number in np.unique(own) if number]
        else:
            described[name] = [*map(float, Moments.of(own)), bool(np.isnan(own).any())]
    return {"columns": described}


def _columns(
    source: str,
    names: Sequence[str],
    categories: Collection[str],
    described: Sequence[Mapping[str, Any]],
    choices: Choices,
    classes: Sequence[str],
) -> Columns:
    """Return the columns, from `_described` of all tables in their order. Raises DataError."""
    columns: list[Number | Category] = []
    for name in names:
        found = [each["columns"][name] for each in described]
        if name in categories:
            values = tuple(sorted({text for each in found for text in each}))
            if len(values) > MOST_VALUES:
                raise too_many_error(source, name)
            columns.append(Category(name, values))
            continue
        moments = functools.reduce(Moments.__add__, [Moments(*each[:3]) for each in found])
        mean, deviation = float(moments.mean), float(moments.deviation)
        if deviation <= 1e-7 * abs(mean):
            deviation = 1.0  # the number never changes
        scale = 1 / deviation
        if not math.isfinite(mean) or not math.isfinite(scale) or not scale:
            raise DataError(
                f"{source}: the column {shown(name)} has numbers too large to be scaled; divide them, or leave it out"
            )
        columns.append(Number(name, mean, scale, any(each[3] for each in found)))
    return Columns(columns, choices.label, classes, choices.ignore)


def _features(path: str, columns: Columns, found: Read) -> np.ndarray:
    values = []
    for column in columns.columns:
        own = found.values[column.name]
        if isinstance(column, Category):
            own = found.texts[column.name].renumbered(column.numbered())[own]
        values.append(own)
    return columns.features_of(values, lambda row: f"{path}, row {row} (without the header)")
