"""Part: a named parameter of a model in a flat array."""

from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """One parameter of a model in a 1-D array: elements `start` to `stop - 1`, an array of `shape` in C order."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + int(np.prod(self.shape, dtype=int))
