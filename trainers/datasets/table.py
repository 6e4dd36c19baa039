"""CSV files, gzipped or not: one sample per line, the label in the last column, with or without a header."""

import io
import warnings
from array import array
from collections.abc import Iterator

import numpy as np

from trainers.datasets import dataset, files
from trainers.errors import DataError

BLOCK = 1 << 22  # characters that are parsed at a time, to bound the memory
LONGEST_LINE = 1 << 24  # characters
LONGEST_SHOWN = 60  # characters of a cell in an error
MOST_NAMES = 1 << 16  # different labels that are not numbers

Line = tuple[int, str]  # its number in the file, and its text


def load(path: str, name: str | None = None) -> dataset.Dataset:
    """Load a data set from a CSV file. Labels are class numbers, or names, which are numbered in alphabetical order.

    Raises DataError.
    """
    parts: list[np.ndarray] = []
    labels, first = _Labels(path), None
    for lines in _blocks(path):
        if first is None:
            if _is_header(lines):
                del lines[0]
            if not lines:
                continue
            first = lines[0]
        _check_columns(path, first, lines)
        parts.append(_features(path, lines))
        labels.add(lines)
    if first is None:
        raise DataError(f"{path} has no samples")
    y, classes = labels.numbered()
    return dataset.make(name or path, (np.concatenate(parts) if len(parts) > 1 else parts[0], y), classes=classes)


def _blocks(path: str) -> Iterator[list[Line]]:
    """Yield lists of the non-blank lines with their line numbers, a few megabytes at a time."""
    lines: list[Line] = []
    taken, held, number = 0, 0, 0
    try:
        with files.opened(path) as (file, most):
            text = io.TextIOWrapper(file, "utf-8-sig")
            while line := text.readline(LONGEST_LINE):
                number += 1
                taken += len(line)
                if taken > most:
                    raise files.too_large_error(path, most)
                if len(line) == LONGEST_LINE:
                    raise DataError(f"{path}, line {number} has more than {LONGEST_LINE} characters; is it a table?")
                if line := line.rstrip("\n"):
                    held += len(line)
                    lines.append((number, line))
                if held > BLOCK:
                    yield _not_blank(lines)
                    lines, held = [], 0
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text file: {error}") from error
    if not taken:
        raise DataError(f"{path} is empty")
    if lines := _not_blank(lines):
        yield lines


def _not_blank(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line[1].strip()]


def _is_header(lines: list[Line]) -> bool:
    """Whether the first line is a header: none of its features is a number, or all labels but its own are numbers."""
    first = lines[0][1].split(",") if lines else []
    features, label = first[:-1], first[-1:]
    if features and not any(map(_is_number, features)):
        return True
    rest = [line.rpartition(",")[2] for _, line in lines[1:]]
    return bool(rest) and not _is_number(label[0]) and all(map(_is_number, rest))


def _check_columns(path: str, first: Line, lines: list[Line]) -> None:
    commas = first[1].count(",")
    if commas == 0:
        raise DataError(f"{path}, line {first[0]} has one column; expected features and a label, with commas between")
    for number, line in lines:
        if line.count(",") != commas:
            raise DataError(
                f"{path}, line {number} has {line.count(',') + 1} columns and line {first[0]} has {commas + 1}; "
                "is the file truncated?"
            )


def _features(path: str, lines: list[Line]) -> np.ndarray:
    source = io.StringIO("\n".join(line.rpartition(",")[0] for _, line in lines))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loadtxt warns of a block of empty cells
            x = np.loadtxt(source, dtype=np.float32, delimiter=",", comments=None, quotechar='"', ndmin=2)
    except ValueError as error:
        hint = f"; of a table with words in it name the label (label=..., --label), and {path} needs a header"
        raise DataError(f"{path}, {_first_wrong_cell(lines) or error}{hint}") from error
    if len(x) != len(lines):  # loadtxt skips empty lines, and a quoted cell may continue on the next line
        wrong_cell = _first_wrong_cell(lines) or f"line {lines[0][0]} or after: a quotation mark is not closed"
        raise DataError(f"{path}, {wrong_cell}")
    wrong = np.argwhere(~np.isfinite(x))
    if wrong.size:
        row, column = wrong[0]
        raise DataError(f"{path}, line {lines[row][0]}, column {column + 1} is {x[row, column]}, not a finite number")
    return x


def _first_wrong_cell(lines: list[Line]) -> str | None:
    for number, line in lines:
        for column, cell in enumerate(line.split(",")[:-1], start=1):
            if not _is_number(cell):
                return f"line {number}, column {column}: {cell.strip()[:LONGEST_SHOWN]!r} is not a number"
    return None


class _Labels:
    """The last column: class numbers, or names."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers, self._names = array("d"), array("q")  # one of them stays empty
        self._numbers_by_name: dict[str, int] = {}  # name -> number in order of appearance
        self._first: dict[bool, tuple[int, str]] = {}  # whether a label is a number -> the first such label: line, text

    def add(self, lines: list[Line]) -> None:
        for number, line in lines:
            cell = line.rpartition(",")[2].strip().strip('"').strip()
            if not cell:
                raise DataError(f"{self._path}, line {number} has no label in its last column")
            numeric = _is_number(cell)
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


def _is_number(cell: str) -> bool:
    try:
        float(cell.strip().strip('"'))
    except ValueError:
        return False
    return True
