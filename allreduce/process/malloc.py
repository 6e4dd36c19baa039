"""Tells glibc's malloc to keep the memory that a training step frees.

glibc returns large blocks (activations, gradients) to the system, and gets them again in the next step, page by page.
So trainers, optimizers and PyTorch's process group tell malloc to keep the memory; the process stays as large as its
largest step. ALLREDUCE_MALLOC=default leaves malloc as it is, and so does any of malloc's own settings in the
environment (MALLOC_..., GLIBC_TUNABLES).
"""

import ctypes
import functools
import logging
import os
import sys

log = logging.getLogger("allreduce")

OPTION = "ALLREDUCE_MALLOC"  # "keep" or "default"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_BLOCK = 32 << 20  # the largest block that malloc takes from its heap
KEPT = 1 << 30  # bytes that may stay free at the end of the heap


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc serve blocks up to LARGEST_BLOCK from its heap and keep freed memory. Returns whether that worked.
    Local.

    Only the first call does anything. Logs it once, at level INFO of the logger "allreduce".
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    keeps = os.environ.get(OPTION, "default" if tuned else "keep") != "default" and _set()
    if keeps:
        log.info("allreduce: malloc keeps the memory that a training step frees; %s=default stops that", OPTION)
    return keeps


def _set() -> bool:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and libc.mallopt(M_TRIM_THRESHOLD, KEPT))
