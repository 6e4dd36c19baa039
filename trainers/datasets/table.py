"""CSV files, gzipped or not: one sample per line, the label in the last column, with or without a header."""

from collections.abc import Sequence

import numpy as np

from trainers.datasets import dataset
from trainers.datasets.columns import MOST_VALUES
from trainers.datasets.learning import Values
from trainers.datasets.rows import Block, Cells, TableFile, is_number, shown
from trainers.errors import DataError


def load(path: str, name: str | None = None) -> dataset.Dataset:
    """Load a data set from a CSV file. Labels are class numbers, or names, which are numbered in alphabetical order.

    Raises DataError.
    """
    table = TableFile(path, lambda cells: not any(map(is_number, cells[:-1])))
    if len(table.names) < 2:
        raise DataError(f"{path}: the first line has one column; expected features and a label, with commas between")
    words = "; of a table with words in it name the label (label=..., --label), and {} needs a header"
    parts: list[np.ndarray] = []
    labels, found_labels = Values(missing=()), []
    for number, block in enumerate(table.blocks()):
        found = block if number else _without_header(block)
        parts.append(features(path, found.columns[:-1], found.lines, words.format(path)))
        if not all(map(str.strip, found.columns[-1])):
            row = [bool(cell.strip()) for cell in found.columns[-1]].index(False)
            raise DataError(f"{path}, line {found.lines[row]} has no label in its last column")
        found_labels.append(labels.add(found.columns[-1]))
    if not any(map(len, parts)):
        raise DataError(f"{path} has no samples")
    y, classes = _numbered(path, np.concatenate(found_labels), labels)
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
            f"{path}, line {lines[row]}, column {column + 1}: {shown(columns[column][row])} is not a number{hint}"
        ) from None
    wrong = np.argwhere(~np.isfinite(x))
    if wrong.size:
        row, column = wrong[0]
        raise DataError(f"{path}, line {lines[row]}, column {column + 1} is {x[row, column]}, not a finite number")
    return x


def _numbered(path: str, numbers: np.ndarray, labels: Values) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return the labels as class numbers, and the names of the classes (None if labels are numbers). numbers: of each
    row's label in `labels`, from 1."""
    texts = labels.texts
    numeric = np.array(list(map(is_number, texts)))
    if numeric.all():
        return np.array(list(map(float, texts)))[numbers - 1], None
    if numeric.any():
        number, word = shown(texts[int(np.argmax(numeric))]), shown(texts[int(np.argmin(numeric))])
        raise DataError(
            f"{path}: the label {number} is a number and {word} is not; labels must be all class numbers or all names"
        )
    if len(texts) > MOST_VALUES:
        raise DataError(f"{path} has more than {MOST_VALUES} different labels; the label is the last column")
    classes = sorted(texts)
    return labels.renumbered({text: number for number, text in enumerate(classes)})[numbers], tuple(classes)
