""".npz archives with x_train, y_train, x_test, y_test, or with x and y."""

from trainers.datasets import dataset, files
from trainers.errors import DataError
from trainers.files import model_file

SPLIT = ("x_train", "y_train", "x_test", "y_test")
WHOLE = ("x", "y")


def load(path: str) -> dataset.Dataset:
    """Raises DataError. Arrays of Python objects are refused: reading them would run code from the file."""

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path} is no .npz archive of numbers, or it is damaged: {error}")

    with files.seekable(path) as (file, size), model_file.opened(file, size, refusal) as archive:
        names = next((names for names in (SPLIT, WHOLE) if set(names) <= set(archive.names)), None)
        if names is None:
            held = ", ".join(archive.names) or "nothing"
            raise DataError(f"{path} holds {held}; expected {', '.join(SPLIT)}, or {' and '.join(WHOLE)}")
        arrays = [archive[name] for name in names]
    return dataset.make(path, (arrays[0], arrays[1]), (arrays[2], arrays[3]) if len(arrays) == 4 else None)
