"""A small folder of MNIST-format files, made of the digits that come along."""

import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from trainers import datasets
from trainers.datasets import idx
from trainers.errors import DataError

SIDE, BOX = 28, 20  # pixels of an image, and of the box in its middle that MNIST's digits fill


def make(folder: str) -> datasets.Dataset:
    """Write the four files of the MNIST format to a folder that is not there or empty; what they hold.

    The folder appears whole or not at all. Raises DataError.
    """
    target = os.path.realpath(folder)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise DataError(f"{folder} is there already; nothing is overwritten: give another name, or remove it first")
    parent, name = os.path.split(target)
    if not os.path.isdir(parent):
        raise DataError(f"the folder {parent} does not exist; make it first")
    aside = Path(parent, f".{name}.{secrets.token_hex(4)}")
    try:
        aside.mkdir()
        _write(aside)
        os.rename(aside, target)  # fails when there are files in the target by now
    except OSError as error:
        raise DataError(f"{folder} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return datasets.load(folder)


def _write(folder: Path) -> None:
    data = datasets.load("digits")
    parts = {"train": (data.x_train, data.y_train), "t10k": (data.x_test, data.y_test)}
    for part, (x, y) in parts.items():
        for name, array in zip(idx.NAMES, (enlarged(x), y.astype(np.uint8)), strict=True):
            (folder / name.format(part=part)).write_bytes(idx.content(array))


def enlarged(digits: np.ndarray) -> np.ndarray:
    """Images of 28x28 bytes of digits of 8x8 numbers from 0 to 16, (rows, 64), interpolated between the pixels."""
    images = digits.reshape(-1, 8, 8)
    places = np.clip((np.arange(BOX) + 0.5) * 8 / BOX - 0.5, 0, 7)  # of the larger pixels' centres among the smaller
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(8)))
    border = (SIDE - BOX) // 2
    large = np.zeros((len(images), SIDE, SIDE), np.uint8)
    inside = np.rint(weights @ images @ weights.T * (255 / 16))
    large[:, border : border + BOX, border : border + BOX] = inside
    return large
