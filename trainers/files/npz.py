"""Opening .npz archives that may be damaged, or no archives at all. No pickle."""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from trainers.errors import TrainerError

# What zipfile, zlib and NumPy raise for bytes that are not what they should be; OSError is for bzip2.
DAMAGES = (
    ValueError,
    KeyError,
    AttributeError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
)


@contextmanager
def opened(file: IO[bytes], refusal: Callable[[Exception], TrainerError]) -> Iterator[Any]:
    """The archive in a file, as numpy.load gives it; damage found in the block raises refusal(what it was)."""
    try:
        with zipfile.ZipFile(file):  # np.load takes what is no archive for a pickle
            file.seek(0)
            yield np.load(file, allow_pickle=False)
    except TrainerError:
        raise
    except DAMAGES as error:
        raise refusal(error) from error
