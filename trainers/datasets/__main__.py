"""Makes small data sets for experiments.

    python -m trainers.datasets make mnist/                    a folder of MNIST-format files
    mpirun -n 4 python -m trainers --data mnist/ --epochs 5    trains on them

make writes 1,437 images to train and 360 to test: the data set "digits", enlarged to 28x28 bytes. It downloads
nothing and overwrites nothing. Exit code: 0, or 2 when the folder can't be made.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainers import datasets
from trainers.datasets import idx
from trainers.datasets.parser import Parser
from trainers.errors import DataError

SIDE, BOX = 28, 20  # pixels of an image, and of the box in its middle that the digit fills, as in MNIST


def make(folder: str) -> datasets.Dataset:
    """Write the four files of the MNIST format to a new or empty folder; returns the Dataset.

    Writes a temporary folder and renames it. Raises DataError.
    """
    target = os.path.realpath(folder)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise DataError(f"{folder} exists already; nothing is overwritten: give another name, or remove it first")
    parent, name = os.path.split(target)
    if not os.path.isdir(parent):
        raise DataError(f"the folder {parent} does not exist; create it first")
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
    """Enlarge digits, (rows, 64) with values 0 to 16, to (rows, 28, 28) uint8 images, by linear interpolation."""
    images = digits.reshape(-1, 8, 8)
    centres = np.clip((np.arange(BOX) + 0.5) * 8 / BOX - 0.5, 0, 7)  # of the new pixels' centres, in old pixels
    weights = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(8)))
    border = (SIDE - BOX) // 2
    large = np.zeros((len(images), SIDE, SIDE), np.uint8)
    inside = np.rint(weights @ images @ weights.T * (255 / 16))
    large[:, border : border + BOX, border : border + BOX] = inside
    return large


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m trainers.datasets", description=__doc__)
    parser.add_argument("command", choices=["make"], help="what to do")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to create; if it exists, it must be empty")
    options = parser.parse_args(arguments)
    try:
        print(f"made {make(options.folder)}")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
