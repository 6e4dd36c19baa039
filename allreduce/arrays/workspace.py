"""Grow-only scratch memory: allocated at the first use, never again for the same size."""

from collections.abc import Callable
from functools import partial

import numpy as np

_ordinary = partial(np.empty, dtype=np.uint8)


class Workspace:
    """Named pieces of scratch memory. A piece's content is lost when it grows."""

    def __init__(self, make: Callable[[int], np.ndarray] = _ordinary) -> None:
        self._make = make
        self._held: dict[str, np.ndarray] = {}

    def array(self, name: str, length: int, dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized 1-D array of `length` elements, a view of the piece `name`."""
        nbytes = length * dtype.itemsize
        held = self._held.get(name)
        if held is None or held.size < nbytes:
            held = self._held[name] = self._make(nbytes)
        return held[:nbytes].view(dtype)

    def take(self) -> dict[str, np.ndarray]:
        """Drop all pieces, and return them, for a caller that keeps them until nothing writes to them."""
        held, self._held = self._held, {}
        return held

    def clear(self) -> None:
        """Drop all pieces."""
        self._held.clear()


ALIGNMENT = 64  # bytes, a cache line; XLA copies arrays with a smaller alignment


def zeros(length: int, dtype: np.dtype) -> np.ndarray:
    """Return `length` zeros at an address divisible by 64. The system allocates pages when they are first touched."""
    nbytes = length * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype)
