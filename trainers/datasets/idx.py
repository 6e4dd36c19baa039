"""Folders of MNIST-format files: IDX, as http://yann.lecun.com/exdb/mnist describes it, gzipped or not."""

import math
import os
import struct
from typing import IO

import numpy as np

from trainers.datasets import dataset, files
from trainers.errors import DataError
from trainers.files import model_file

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_DIMENSIONS = 32  # of a NumPy array
NAMES = ("{part}-images-idx3-ubyte", "{part}-labels-idx1-ubyte")


def load(folder: str) -> dataset.Dataset:
    """Load a data set from a folder with the files train-images-idx3-ubyte, train-labels-idx1-ubyte,
    t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.

    The names may have "." instead of "-" before "idx", and end in ".gz". Without the t10k files a fifth of the training
    samples is for testing. Raises DataError.
    """
    train = _part(folder, "train")
    if train is None:
        raise DataError(f"{folder} holds no {NAMES[0].format(part='train')} (or .gz); expected MNIST-format files")
    return dataset.make(folder, train, _part(folder, "t10k"))


def read(path: str, dimensions: str) -> np.ndarray:
    """Return the array in an IDX file. dimensions: "labels" (1-D) or "images" (2-D or more). Raises DataError."""
    with files.opened(path) as (file, most):
        dtype, shape = _header(path, file, dimensions)
        wanted = math.prod(shape) * dtype.itemsize
        found = files.remaining(file, min(wanted, most))  # before memory is allocated for it
        if most < found <= wanted:
            raise files.too_large_error(path, most)
        if found != wanted:
            header = 4 + 4 * len(shape)
            state, has = ("truncated", header + found) if found < wanted else ("too long", "more")
            raise DataError(f"{path} is {state}: its header says {header + wanted} bytes (shape {shape}), it has {has}")
        content = model_file.read_up_to(file, wanted)
    if wanted == 0:
        raise DataError(f"{path} is empty: its header says shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _header(path: str, file: IO[bytes], dimensions: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and the shape from the header of an IDX file."""
    magic = model_file.read_up_to(file, 4)
    if not magic:
        raise DataError(f"{path} is empty")
    if len(magic) < 4:
        raise DataError(f"{path} is truncated: {len(magic)} bytes, less than the 4 of an IDX magic number")
    zero, kind, ndim = struct.unpack(">HBB", magic)
    expected = "0x00000801" if dimensions == "labels" else "0x00000803"
    if zero or kind not in TYPES or ndim == 0 or (ndim == 1) != (dimensions == "labels") or ndim > MOST_DIMENSIONS:
        raise DataError(f"{path} has magic number 0x{magic.hex()}; {dimensions} in IDX format have {expected}")
    sizes = model_file.read_up_to(file, 4 * ndim)
    if len(sizes) < 4 * ndim:
        raise DataError(f"{path} is truncated: {4 + len(sizes)} bytes, and its header alone takes {4 + 4 * ndim}")
    return np.dtype(TYPES[kind]), struct.unpack(f">{ndim}I", sizes)


def _part(folder: str, part: str) -> tuple[np.ndarray, np.ndarray] | None:
    images, labels = (_find(folder, name.format(part=part)) for name in NAMES)
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        found, lacking = (images, "labels") if images else (labels, "images")
        raise DataError(f"{folder} has {os.path.basename(str(found))} but no {part} {lacking} beside it")
    x, y = read(images, "images"), read(labels, "labels")
    if len(x) != len(y):
        raise DataError(f"{images} has {len(x)} images and {labels} has {len(y)} labels; the numbers must be equal")
    return x, y


def _find(folder: str, name: str) -> str | None:
    for candidate in (name, name.replace("-idx", ".idx")):
        for ending in ("", ".gz"):
            path = os.path.join(folder, candidate + ending)
            if os.path.exists(path):
                return path
    return None
