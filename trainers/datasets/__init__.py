"""Data sets: two that come with this package, and files of the usual formats. No MPI, no download."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from trainers.datasets import dataset, idx, table
from trainers.datasets.columns import Columns
from trainers.datasets.dataset import Dataset
from trainers.datasets.files import read_archive
from trainers.datasets.learning import Choices
from trainers.datasets.rows import is_table
from trainers.datasets.shards import Shards, is_pattern
from trainers.errors import ArgumentError, DataError

NAMES = ("digits", "iris")
_HERE = Path(__file__).parent
_FORMATS = "a folder of MNIST-format IDX files, an .npz, a .csv or a .tsv file"

__all__ = ["NAMES", "Columns", "Dataset", "Shards", "load"]


def load(
    source: str,
    label: str | None = None,
    *,
    ignore: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    columns: Columns | None = None,
) -> Dataset:
    """Load a data set by its name ("digits", "iris") or its path: a folder of MNIST-format files (gzipped or not), an
    .npz with x_train, y_train, x_test, y_test (or x, y), or a .csv or .tsv (.csv.gz, .tsv.gz).

    label: the name of the label's column in a table with a header. Its other columns may have numbers, categories (any
        words) and missing values. None: a .csv of numbers alone, with the label in the last column.
    ignore: names of columns that are not used. categories: names of columns whose numbers are categories.
    columns: of a trained model (replica.columns), for its kind of table; None to learn them from the rows to train.

    A data set without a test part is split 80 : 20, in the same way at every call. Raises DataError, ArgumentError.
    """
    choices = checked_choices(source, label, ignore, categories, columns)
    if source in NAMES:
        return table.load(str(_HERE / f"{source}.csv.gz"), source)
    if os.path.isdir(source):
        return idx.load(source)
    if is_pattern(source):
        raise DataError(f"{source}: a pattern of several files is for trainers.load_shards, and for --data")
    if not os.path.exists(source):
        raise _unknown(source)
    if source.endswith(".npz"):
        x, y, *test = read_archive(source)
        return dataset.make(source, (x, y), (test[0], test[1]) if test else None)
    if choices is not None or columns is not None:
        return _table(source, choices, columns)
    if source.endswith((".csv", ".csv.gz")):
        return table.load(source)
    if is_table(source):
        raise DataError(f"{source}: name the column of the label (label=..., --label)")
    raise DataError(f"{source} has none of the known formats: {_FORMATS}")


def _unknown(source: str) -> DataError:
    """Return the error about a source that is neither the name of a data set nor a path that exists."""
    near = difflib.get_close_matches(source, NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; use {', '.join(NAMES)}, {_FORMATS}"
    return DataError(f"there is no data set and no file {source!r}{hint}")


def checked_choices(
    source: str,
    label: str | None,
    ignore: str | Sequence[str],
    categories: str | Sequence[str],
    columns: Columns | None,
) -> Choices | None:
    """Return how a table is read, from the arguments of `load`; None if the source is no table, or with `columns`.
    Raises ArgumentError."""
    ignored, forced = ([each] if isinstance(each, str) else [*dict.fromkeys(each)] for each in (ignore, categories))
    if columns is not None:
        if not is_table(source):
            raise ArgumentError(f"{source} is no table (.csv, .tsv), and the model was trained on one: {columns}")
        if ignored or forced or label not in (None, columns.label):
            raise ArgumentError(
                f"{source}: the model has its columns already, with the label {columns.label!r}: leave out "
                "label, ignore and categories"
            )
        return None
    if label is None:
        if ignored or forced:
            raise ArgumentError(f"{source}: ignore and categories are for tables with a label by name: give label=...")
        return None
    if not is_table(source):
        raise ArgumentError(f"label={label!r} is for tables (.csv, .tsv), not for {source}")
    return Choices(label, tuple(ignored), tuple(forced))


def _table(source: str, choices: Choices | None, columns: Columns | None) -> Dataset:
    whole = Shards(source, [source], choices, columns)
    (x, y), (x_test, y_test) = whole.train.rows(0), whole.test.rows(0)
    assert whole.columns is not None
    return Dataset(source, x, y, x_test, y_test, whole.classes, 0.0, 1.0, whole.columns)
