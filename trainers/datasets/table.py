"""CSV files, gzipped or not: one sample a line, the label in the last column, a header or none."""

import io

import numpy as np

from trainers.datasets import dataset, files
from trainers.errors import DataError


def load(path: str, name: str | None = None) -> dataset.Dataset:
    """Features are numbers; labels are class numbers, or names, which are numbered in alphabetical order.

    Raises DataError.
    """
    try:
        text = files.read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if lines and _is_header(lines):
        del lines[0]
    if not lines:
        raise DataError(f"{path} has no samples")
    _check_columns(path, lines)
    x = _features(path, lines)
    y, classes = _labels(path, lines)
    return dataset.make(name or path, (x, y), classes=classes)


def _is_header(lines: list[tuple[int, str]]) -> bool:
    """The first line is a header when none of its features is a number, or its label alone is not."""
    first = lines[0][1].split(",")
    features, label = first[:-1], first[-1]
    if features and not any(map(_is_number, features)):
        return True
    rest = [line.rpartition(",")[2] for _, line in lines[1:]]
    return bool(rest) and not _is_number(label) and all(map(_is_number, rest))


def _check_columns(path: str, lines: list[tuple[int, str]]) -> None:
    first_number, first = lines[0]
    commas = first.count(",")
    if commas == 0:
        raise DataError(
            f"{path}, line {first_number} has one column; expected features and a label, with commas between"
        )
    for number, line in lines:
        if line.count(",") != commas:
            raise DataError(
                f"{path}, line {number} has {line.count(',') + 1} columns and line {first_number} has {commas + 1}; "
                "is the file truncated?"
            )


def _features(path: str, lines: list[tuple[int, str]]) -> np.ndarray:
    source = io.StringIO("\n".join(line.rpartition(",")[0] for _, line in lines))
    try:
        x = np.loadtxt(source, dtype=np.float32, delimiter=",", comments=None, quotechar='"', ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}, {_first_wrong_cell(lines) or error}") from error
    wrong = np.argwhere(~np.isfinite(x))
    if wrong.size:
        row, column = wrong[0]
        raise DataError(f"{path}, line {lines[row][0]}, column {column + 1} is {x[row, column]}, no finite number")
    return x


def _first_wrong_cell(lines: list[tuple[int, str]]) -> str | None:
    for number, line in lines:
        for column, cell in enumerate(line.split(",")[:-1], start=1):
            if not _is_number(cell):
                return f"line {number}, column {column}: {cell.strip()!r} is no number"
    return None


def _labels(path: str, lines: list[tuple[int, str]]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    cells = [line.rpartition(",")[2].strip().strip('"').strip() for _, line in lines]
    if "" in cells:
        raise DataError(f"{path}, line {lines[cells.index('')][0]} has no label in its last column")
    numeric = [_is_number(cell) for cell in cells]
    if all(numeric):
        return np.array(cells, dtype=np.float64), None
    if any(numeric):
        odd = numeric.index(2 * sum(numeric) <= len(cells))  # of the kind that fewer labels have
        raise DataError(
            f"{path}, line {lines[odd][0]}: the label {cells[odd]!r} is {'a' if numeric[odd] else 'no'} number, "
            "unlike others; labels must be all class numbers or all names"
        )
    names, numbers = np.unique(np.array(cells), return_inverse=True)
    return numbers, tuple(names.tolist())


def _is_number(cell: str) -> bool:
    try:
        float(cell.strip().strip('"'))
    except ValueError:
        return False
    return True
