"""Data sets: two that come with this package, and files of the usual formats. No MPI, no download."""

import difflib
import os
from pathlib import Path

from trainers.datasets import dataset, files, idx, table
from trainers.datasets.dataset import Dataset
from trainers.errors import DataError
from trainers.files import model_file

NAMES = ("digits", "iris")
_HERE = Path(__file__).parent
_FORMATS = "a folder of MNIST-format IDX files, an .npz or a .csv file"

__all__ = ["NAMES", "Dataset", "load"]


def load(source: str) -> Dataset:
    """Load a data set by its name ("digits", "iris") or its path: a folder of MNIST-format files (gzipped or not), an
    .npz with x_train, y_train, x_test, y_test (or x, y), or a .csv (.csv.gz) with the label in the last column.

    A data set without a test part is split 80 : 20, in the same way at every call. Raises DataError.
    """
    if source in NAMES:
        return table.load(str(_HERE / f"{source}.csv.gz"), source)
    if os.path.isdir(source):
        return idx.load(source)
    if not os.path.exists(source):
        near = difflib.get_close_matches(source, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; use {', '.join(NAMES)}, {_FORMATS}"
        if os.path.basename(os.path.normpath(source)) == "mnist":
            hint = f"; make a small one by: python -m trainers.datasets make {source}"
        raise DataError(f"there is no data set and no file {source!r}{hint}")
    if source.endswith(".npz"):
        return _archive(source)
    if source.endswith((".csv", ".csv.gz")):
        return table.load(source)
    raise DataError(f"{source} has none of the known formats: {_FORMATS}")


SPLIT = ("x_train", "y_train", "x_test", "y_test")
WHOLE = ("x", "y")


def _archive(path: str) -> Dataset:
    """Load an .npz archive. Arrays of Python objects raise DataError: reading them would run code from the file."""

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path} is not an .npz archive of numbers, or is damaged: {error}")

    with files.seekable(path) as (file, size), model_file.open_archive(file, size, refusal) as archive:
        names = next((names for names in (SPLIT, WHOLE) if set(names) <= set(archive.names)), None)
        if names is None:
            held = ", ".join(archive.names) or "nothing"
            raise DataError(f"{path} holds {held}; expected {', '.join(SPLIT)}, or {' and '.join(WHOLE)}")
        arrays = [archive[name] for name in names]
    return dataset.make(path, (arrays[0], arrays[1]), (arrays[2], arrays[3]) if len(arrays) == 4 else None)
