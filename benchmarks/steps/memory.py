"""The memory of a process: its peak while a block runs."""

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def trim() -> None:
    """Give freed memory back to the system, so that the next variant starts from the same place."""
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _memory_now() -> float:
    """This process's proportional set size in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0.0


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the memory while the block runs; the one number in the list becomes the highest rise in bytes."""
    before, peak, done = _memory_now(), [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory_now() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
