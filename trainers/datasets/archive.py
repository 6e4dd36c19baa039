"""Archives (.npz) of the arrays x_train, y_train, x_test, y_test, or x and y."""

import numpy as np

from trainers.datasets import files
from trainers.errors import DataError
from trainers.files import model_file

SPLIT = ("x_train", "y_train", "x_test", "y_test")
WHOLE = ("x", "y")


def read(path: str) -> list[np.ndarray]:
    """Return the arrays of SPLIT or of WHOLE. Arrays of Python objects raise DataError: reading them would run code
    from the file."""

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path} is not an .npz archive of numbers, or is damaged: {error}")

    with files.seekable(path) as (file, size), model_file.open_archive(file, size, refusal) as archive:
        names = next((names for names in (SPLIT, WHOLE) if set(names) <= set(archive.names)), None)
        if names is None:
            held = ", ".join(archive.names) or "nothing"
            raise DataError(f"{path} holds {held}; expected {', '.join(SPLIT)}, or {' and '.join(WHOLE)}")
        return [archive[name] for name in names]
