"""The user's options for checkpoints (Checkpoint), and the state of the global random generators. No MPI."""

import math
import os
import random
import re
from dataclasses import dataclass

import numpy as np

from trainers.errors import ArgumentError

NOTATION = re.compile(r"(?:(\d+(?:\.\d+)?)\s*)?([a-z]+)")
UNITS = {"step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs"}
SECONDS = {
    "s": 1, "second": 1, "seconds": 1, "min": 60, "minute": 60, "minutes": 60, "h": 3600, "hour": 3600, "hours": 3600,
}  # fmt: skip
MODES = ("auto", "min", "max")


@dataclass(frozen=True)
class Checkpoint:
    """Options of a fit's checkpoints: the folder, how often they are written, and how many are kept.

    folder: a folder for this training alone; created if missing. Only rank 0 uses it. Rank 0 also needs memory for a
        copy of the model and the optimizer's state, from which a thread writes.
    every: "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes", "2 hours". A checkpoint is also written at the
        end of the training, and when a callback stops it.
    keep: how many of the newest checkpoints stay.
    best: a name in the history ("loss", "accuracy", "validation_loss", ...): the checkpoint of the epoch in which it
        was best is kept as best.npz.
    mode: whether the lowest ("min") or the highest ("max") is the best; "auto": the lowest loss or error, the highest
        of anything else.
    same_data: whether a resumed training must have the same rows in the same order; some rows are compared. False:
        other rows are accepted, as many as before.

    The random numbers that a data set draws (from Python, NumPy or the framework) continue exactly only with
    prefetch=False: batches that are fetched ahead have drawn theirs before the state is saved.

    Raises ArgumentError.
    """

    folder: str
    every: str = "epoch"
    keep: int = 3
    best: str = ""
    mode: str = "auto"
    same_data: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder) or "\0" in str(self.folder):
            raise ArgumentError(f"Checkpoint({self.folder!r}): give the name of a folder")
        object.__setattr__(self, "folder", os.fspath(self.folder))
        period(self.every)
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ArgumentError(f"Checkpoint: keep must be an integer >= 1, got {self.keep!r}")
        if not isinstance(self.same_data, bool):
            raise ArgumentError(f"Checkpoint: same_data must be True or False, got {self.same_data!r}")
        if self.mode not in MODES or not isinstance(self.best, str):
            raise ArgumentError(
                f"Checkpoint(best={self.best!r}, mode={self.mode!r}): give a name in the history, and one of "
                f"{', '.join(MODES)}"
            )

    @property
    def lowest_is_best(self) -> bool:
        return self.mode == "min" or (self.mode == "auto" and self.best.endswith(("loss", "error")))


def period(every: str) -> tuple[float, str]:
    """Parse `every` into (count, unit); unit is "steps", "epochs" or "seconds". Raises ArgumentError."""
    match = NOTATION.fullmatch(every.strip().lower()) if isinstance(every, str) else None
    count, word = (float(match[1] or 1), match[2]) if match else (0.0, "")
    if word in SECONDS and 0 < count < math.inf:
        return count * SECONDS[word], "seconds"
    if word in UNITS and count >= 1 and count.is_integer():
        return count, UNITS[word]
    raise ArgumentError(
        f'every={every!r} is no period: use "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes" or "2 hours"'
    )


WORDS = 624  # 32-bit words in the state of NumPy's generator
PYTHON, NUMPY = "random.python", "random.numpy"


def random_state() -> dict[str, np.ndarray]:
    """Return the states of Python's and NumPy's global random generators as arrays."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        PYTHON: np.array([version, *words], np.int64),
        f"{PYTHON}.gauss": np.array([] if gauss is None else [gauss]),
        NUMPY: np.array([position, has_gauss, *keys], np.int64),
        f"{NUMPY}.gauss": np.array([cached]),
    }


def load_random_state(state: dict[str, np.ndarray]) -> None:
    """Load a result of `random_state` into the global random generators. Raises KeyError, TypeError, ValueError or
    OverflowError for anything else."""
    version, *words = state[PYTHON].tolist()
    gauss = state[f"{PYTHON}.gauss"].tolist()
    position, has_gauss, *keys = state[NUMPY].tolist()
    (cached,) = state[f"{NUMPY}.gauss"].tolist()
    if len(keys) != WORDS or not 0 <= position <= WORDS or has_gauss not in (0, 1):  # NumPy does not check these
        raise ValueError(f"NumPy's random state has {len(keys)} words, and the next one is number {position}")
    numbers = np.array(keys, np.uint32)
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    np.random.set_state(("MT19937", numbers, position, has_gauss, cached))
