"""Huge pages: moves long arrays that several ranks access into pages of 2 MiB, where Linux has them.

The processor looks up the address of every page, and Linux pins every page that another process accesses by CMA. NumPy
asks for huge pages; PyTorch and others leave the usual 4 KiB, with which an all-reduce of 40 MB by CMA takes more than
twice the processor time. Shared memory has 4 KiB too, and takes a third more time than with huge pages. The content and
the addresses of an array do not change.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

HUGE = 2 << 20  # bytes of a huge page of x86-64, and of arm64 with pages of 4 KiB
SHORTEST = 2 * HUGE  # bytes: shorter arrays may hold no whole huge page
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def move(address: int, nbytes: int) -> None:
    """Move the whole huge pages in a span of memory, as far as the system can. Local."""
    begin, end = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    if begin < end and (advise := _madvise()) is not None:
        advise(begin, end - begin, COLLAPSE)


@cache
def _madvise() -> Any:
    """Return madvise of the C library; None where there is none, or where the system uses no huge pages."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    try:
        never = "[never]" in SETTING.read_text()
    except OSError:  # another system
        never = True
    if function is None or never:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
