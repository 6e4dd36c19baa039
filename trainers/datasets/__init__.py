"""Data sets: two that come with this package, and files of the usual formats. No MPI, no download."""

import difflib
import os
from pathlib import Path

from trainers.datasets import archive, idx, table
from trainers.datasets.dataset import Dataset
from trainers.errors import DataError

NAMES = ("digits", "iris")
_HERE = Path(__file__).parent
_FORMATS = "a folder of MNIST-format IDX files, an .npz or a .csv file"

__all__ = ["NAMES", "Dataset", "load"]


def load(source: str) -> Dataset:
    """A data set by its name ("digits", "iris") or its path: a folder of MNIST-format files (gzipped or not), an
    .npz with x_train, y_train, x_test, y_test (or x, y), or a .csv (.csv.gz) with the label in the last column.

    A set that comes without a test part is split 80 : 20, in the same way at every call. Raises DataError.
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
        return archive.load(source)
    if source.endswith((".csv", ".csv.gz")):
        return table.load(source)
    raise DataError(f"{source} is none of the known formats, which are {_FORMATS}")
