"""Reading files, gzipped or not, and archives of arrays, with errors that name the file."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

from trainers.errors import DataError
from trainers.files import model_file

GZIP = b"\x1f\x8b"
ARRAYS = ("x_train", "y_train", "x_test", "y_test"), ("x", "y")  # the names of an archive's arrays


@contextmanager
def opened(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file, unpacked if it is gzipped (whatever its name); yields it and the most bytes that it may hold.

    Raises DataError, also for read errors in the block.
    """
    try:
        with model_file.open_regular(path) as file:
            size, packed = model_file.size(file), file.read(len(GZIP)) == GZIP
            file.seek(0)
            if not packed:
                yield file, size
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked, model_file.most_unpacked(size)  # type: ignore[misc]  # a GzipFile reads as a file does
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from error
    except MemoryError as error:
        raise DataError(f"{path} is too large for the memory of this machine") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


@contextmanager
def seekable(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """As `opened`, for random access: a gzipped file is unpacked into memory. Yields the file and its size."""
    with opened(path) as (file, most):
        if most == 0:
            raise DataError(f"{path} is empty")
        if not isinstance(file, gzip.GzipFile):
            yield file, most
            return
        content = model_file.read_up_to(file, most + 1)
    if len(content) > most:
        raise too_large_error(path, most)
    yield io.BytesIO(content), len(content)


def remaining(file: IO[bytes], enough: int) -> int:
    """Return the number of bytes from here to the end of an opened file, at most `enough` + 1. Restores the position.

    A gzipped file is unpacked for that, and again when it is read: the size in its header may be wrong.
    """
    if not isinstance(file, gzip.GzipFile):
        return model_file.size(file) - file.tell()
    begin, count = file.tell(), 0
    while count <= enough and (piece := file.read(min(model_file.PIECE, enough + 1 - count))):
        count += len(piece)
    file.seek(begin)
    return count


def too_large_error(path: str, most: int) -> DataError:
    """Return the error about a compressed file that holds more than `most` bytes."""
    return DataError(f"{path} unpacks to more than {most} bytes, too many for its size; unpack it yourself to use it")


def read_archive(path: str) -> list[np.ndarray]:
    """Return the arrays x_train, y_train, x_test, y_test, or x and y, of an .npz archive. Arrays of Python objects
    raise DataError: reading them would run code from the file."""

    def refusal(error: Exception) -> DataError:
        return DataError(f"{path} is not an .npz archive of numbers, or is damaged: {error}")

    with seekable(path) as (file, size), model_file.open_archive(file, size, refusal) as archive:
        names = next((names for names in ARRAYS if set(names) <= set(archive.names)), None)
        if names is None:
            held = ", ".join(archive.names) or "nothing"
            raise DataError(f"{path} holds {held}; expected {', '.join(ARRAYS[0])}, or {' and '.join(ARRAYS[1])}")
        return [archive[name] for name in names]
