"""CSV files, gzipped or not: one sample per line, the label in the last column, with or without a header."""

from array import array
from collections.abc import Sequence

import numpy as np

from trainers.datasets import dataset
from trainers.datasets.rows import LONGEST_SHOWN, Block, Cells, TableFile, is_number
from trainers.errors import DataError

MOST_NAMES = 1 << 16  # different labels that are not numbers


def load(path: str, name: str | None = None) -> dataset.Dataset:
    """Load a data set from a CSV file. Labels are class numbers, or names, which are numbered in alphabetical order.

    Raises DataError.
    """
    table = TableFile(path, lambda cells: not any(map(is_number, cells[:-1])))
    if len(table.names) < 2:
        raise DataError(f"{path}: the first line has one column; expected features and a label, with commas between")
    words = "; of a table with words in it name the label (label=..., --label), and {} needs a header"
    parts: list[np.ndarray] = []
    labels = _Labels(path)
    for number, block in enumerate(table.blocks()):
        found = block if number else _without_header(block)
        parts.append(features(path, found.columns[:-1], found.lines, words.format(path)))
        labels.add(found.columns[-1], found.lines)
    if not any(map(len, parts)):
        raise DataError(f"{path} has no samples")
    y, classes = labels.numbered()
    return dataset.make(name or path, (np.concatenate(parts), y), classes=classes)


def _without_header(block: Block) -> Block:
    """Drop a header whose feature names are numbers: in its column only its label is no number. Return the rows."""
    first, *rest = block.columns[-1]
    if rest and not is_number(first) and all(map(is_number, rest)):
        return Block([cells[1:] for cells in block.columns], block.lines[1:])
    return block


def features(path: str, columns: Sequence[Cells], lines: Sequence[int], hint: str = "") -> np.ndarray:
    """Return the numbers in columns of cells, (rows, columns) float32. lines: of the rows in the file. hint: ends the
    error about a cell that is no number. Raises DataError."""
    try:
        x = np.array([list(map(float, cells)) for cells in columns]).T.astype(np.float32)
        if any("_" in "".join(cells) for cells in columns):  # which float takes
            raise ValueError
    except ValueError:
        row, column = next(
            (row, column)
            for row in range(len(lines))
            for column, cells in enumerate(columns)
            if not is_number(cells[row])
        )
        raise DataError(
            f"{path}, line {lines[row]}, column {column + 1}: {columns[column][row][:LONGEST_SHOWN]!r} is not a "
            f"number{hint}"
        ) from None
    wrong = np.argwhere(~np.isfinite(x))
    if wrong.size:
        row, column = wrong[0]
        raise DataError(f"{path}, line {lines[row]}, column {column + 1} is {x[row, column]}, not a finite number")
    return x


class _Labels:
    """The last column: class numbers, or names."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers, self._names = array("d"), array("q")  # one of them stays empty
        self._numbers_by_name: dict[str, int] = {}  # name -> number in order of appearance
        self._first: dict[bool, tuple[int, str]] = {}  # whether a label is a number -> the first such label: line, text

    def add(self, cells: Cells, lines: Sequence[int]) -> None:
        for number, cell in zip(lines, map(str.strip, cells), strict=True):
            if not cell:
                raise DataError(f"{self._path}, line {number} has no label in its last column")
            numeric = is_number(cell)
            self._first.setdefault(numeric, (number, cell[:LONGEST_SHOWN]))
            if numeric:
                self._numbers.append(float(cell))
            else:
                self._names.append(self._numbers_by_name.setdefault(cell, len(self._numbers_by_name)))
        if len(self._numbers_by_name) > MOST_NAMES:
            raise DataError(f"{self._path} has more than {MOST_NAMES} different labels; the label is the last column")

    def numbered(self) -> tuple[np.ndarray, tuple[str, ...] | None]:
        """Return the labels as class numbers, and the names of the classes (None if labels are numbers)."""
        if len(self._first) > 1:
            odd = len(self._numbers) <= len(self._names)
            number, cell = self._first[odd]  # the first label of the rarer kind
            raise DataError(
                f"{self._path}, line {number}: the label {cell!r} is {'a' if odd else 'not a'} number, "
                "unlike others; labels must be all class numbers or all names"
            )
        if self._numbers:
            return np.array(self._numbers), None
        classes = sorted(self._numbers_by_name)
        order = np.empty(len(classes), np.int64)
        order[[self._numbers_by_name[name] for name in classes]] = np.arange(len(classes))
        return order[np.array(self._names)], tuple(classes)
