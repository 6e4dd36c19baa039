"""Makes small data sets for experiments.

    python -m trainers.datasets make mnist/                    a folder of MNIST-format files
    mpirun -n 4 python -m trainers --data mnist/ --epochs 5    trains on them
    python -m trainers.datasets make people.csv                a table (.csv, .tsv) of 2,000 people who do not exist
    mpirun -n 4 python -m trainers --data people.csv --label income --ignore name

make mnist/ writes 1,437 images to train and 360 to test: the data set "digits", enlarged to 28x28 bytes. A table has
numbers, words and missing values. make downloads nothing and overwrites nothing. Exit code: 0, or 2 when the folder or
the table can't be made.
"""

import csv
import io
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
from trainers.datasets.rows import ENDINGS, is_table
from trainers.errors import DataError, as_error
from trainers.files import model_file

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
        with as_error(DataError, f"{folder} can't be written"):
            aside.mkdir()
            _write(aside)
            os.rename(aside, target)  # fails when there are files in the target by now
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return datasets.load(folder)


PEOPLE = 2000
JOBS = ("clerk", "cook", "driver", "engineer", "nurse", "teacher")
TOWNS = 40


def people() -> list[list[str]]:
    """Return a made table: the names of its columns, then its rows. Some ages and jobs are missing."""
    random = np.random.default_rng(1)
    rows = [["name", "age", "hours", "job", "town", "income"]]
    for number in range(PEOPLE):
        age, hours = int(random.integers(18, 70)), float(random.normal(37, 6))
        job, town = int(random.integers(len(JOBS))), int(random.integers(TOWNS))
        score = (age - 44) / 15 + (hours - 37) / 6 + (job - 2.5) / 2 + town % 5 - 2 + random.normal(0, 0.3)
        absent = random.random(2) < 0.04
        known = ["" if gone else each for gone, each in zip(absent, (str(age), JOBS[job]), strict=True)]
        income = "high" if score > 0 else "low"
        rows.append([f"person {number}", known[0], f"{hours:.1f}", known[1], f"town {town}", income])
    return rows


def make_table(path: str) -> str:
    """Write the table of `people` to a new file, .csv or .tsv; returns a text about it. Raises DataError."""
    if os.path.lexists(path):
        raise DataError(f"{path} exists already; nothing is overwritten: give another name, or remove it first")
    if path.endswith(".gz"):
        raise DataError(f"{path}: give a name that ends in .csv or .tsv")
    text = io.StringIO()
    csv.writer(text, delimiter=ENDINGS[os.path.splitext(path)[1]], lineterminator="\n").writerows(people())
    with as_error(DataError, f"{path} can't be written"), model_file.replacing(path) as file:
        file.write(text.getvalue().encode())
    return f"{path}: {PEOPLE} rows"


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
    parser = Parser(prog="python -m trainers.datasets", description=__doc__)
    parser.add_argument("command", choices=["make"], help="what to do")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to create (empty if it exists), or the table")
    options = parser.parse_args(arguments)
    try:
        table = is_table(options.folder)
        print(f"made {make_table(options.folder) if table else make(options.folder)}")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
