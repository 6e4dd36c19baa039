"""Memory that begins where vectors and caches begin, which NumPy's does by chance."""

import numpy as np

BYTES = 64  # a cache line; XLA copies what is not aligned so


def zeros(length: int, dtype: np.dtype) -> np.ndarray:
    """`length` zeros at an address divisible by 64; the system gives their pages when they are first touched."""
    nbytes = length * dtype.itemsize
    memory = np.zeros(nbytes + BYTES - 1, np.uint8)
    start = -memory.ctypes.data % BYTES
    return memory[start : start + nbytes].view(dtype)
