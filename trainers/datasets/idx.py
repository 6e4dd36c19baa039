"""Folders of MNIST-format files: IDX, as http://yann.lecun.com/exdb/mnist describes it, gzipped or not."""

import math
import os
import struct

import numpy as np

from trainers.datasets import dataset, files
from trainers.errors import DataError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
NAMES = ("{part}-images-idx3-ubyte", "{part}-labels-idx1-ubyte")


def load(folder: str) -> dataset.Dataset:
    """train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte.

    With .gz or without, and "." or "-" before "idx". Without the t10k files a fifth of the training
    samples is for testing. Raises DataError.
    """
    train = _part(folder, "train")
    if train is None:
        raise DataError(f"{folder} holds no {NAMES[0].format(part='train')} (or .gz); expected MNIST-format files")
    return dataset.make(folder, train, _part(folder, "t10k"))


def read(path: str, dimensions: str) -> np.ndarray:
    """The array in an IDX file. dimensions: "labels" (1-D) or "images" (2-D or more). Raises DataError."""
    content = files.read(path)
    if len(content) < 4:
        raise DataError(f"{path} is truncated: {len(content)} bytes, less than the 4 of an IDX magic number")
    magic, kind, ndim = struct.unpack(">HBB", content[:4])
    expected = "0x00000801" if dimensions == "labels" else "0x00000803"
    if magic or kind not in TYPES or ndim == 0 or (ndim == 1) != (dimensions == "labels"):
        raise DataError(f"{path} has magic number 0x{content[:4].hex()}; {dimensions} in IDX format have {expected}")
    begin = 4 + 4 * ndim
    if len(content) < begin:
        raise DataError(f"{path} is truncated: {len(content)} bytes, and its header alone takes {begin}")
    shape = struct.unpack(f">{ndim}I", content[4:begin])
    dtype = np.dtype(TYPES[kind])
    wanted = begin + math.prod(shape) * dtype.itemsize
    if len(content) != wanted:
        state = "truncated" if len(content) < wanted else "too long"
        raise DataError(f"{path} is {state}: its header says {wanted} bytes (shape {shape}), it has {len(content)}")
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _part(folder: str, part: str) -> tuple[np.ndarray, np.ndarray] | None:
    images, labels = (_find(folder, name.format(part=part)) for name in NAMES)
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        found, lacking = (images, "labels") if images else (labels, "images")
        raise DataError(f"{folder} has {os.path.basename(str(found))} but no {part} {lacking} beside it")
    x, y = read(images, "images"), read(labels, "labels")
    if len(x) != len(y):
        raise DataError(f"{images} has {len(x)} images and {labels} has {len(y)} labels; they don't belong together")
    return x, y


def _find(folder: str, name: str) -> str | None:
    for candidate in (name, name.replace("-idx", ".idx")):
        for ending in ("", ".gz"):
            path = os.path.join(folder, candidate + ending)
            if os.path.exists(path):
                return path
    return None
