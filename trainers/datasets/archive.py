""".npz archives with x_train, y_train, x_test, y_test, or with x and y."""

import io
import zipfile

import numpy as np

from trainers.datasets import dataset, files
from trainers.errors import DataError

SPLIT = ("x_train", "y_train", "x_test", "y_test")
WHOLE = ("x", "y")


def load(path: str) -> dataset.Dataset:
    """Raises DataError. Arrays of Python objects are refused: reading them would run code from the file."""
    content = files.read(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)):  # np.load takes what is no archive for a pickle
            archive = np.load(io.BytesIO(content), allow_pickle=False)
            names = next((names for names in (SPLIT, WHOLE) if set(names) <= set(archive.files)), None)
            if names is None:
                held = ", ".join(archive.files) or "nothing"
                raise DataError(f"{path} holds {held}; expected {', '.join(SPLIT)}, or {' and '.join(WHOLE)}")
            arrays = [archive[name] for name in names]
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no .npz archive of numbers, or it is damaged: {error}") from error
    return dataset.make(path, (arrays[0], arrays[1]), (arrays[2], arrays[3]) if len(arrays) == 4 else None)
