"""Shared segments: memory that the ranks of a node share, a file in /dev/shm that all of them map.

- The file has a name only until all ranks have opened it, so no file is left behind, however a process ends.
- Its pages are allocated before they are touched: too small a /dev/shm is an error, never a bus error.
- A mapping lives as long as the last array in it, and the memory as long as the last mapping. So freeing it is local.
  (Freeing an MPI window is collective: an array that outlives its backend would keep the window for ever.)
"""

import ctypes
import errno
import mmap
import os
import secrets
import tempfile
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.errors import UnavailableError
from allreduce.transport import huge_pages
from allreduce.transport.control import on_all_ranks, root_value, together

SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
PAGE_BYTES = mmap.PAGESIZE
NOT_SHARED = f"the ranks can't share memory in {SHARED_MEMORY} ({{}}); use another backend, such as ring"
MAP_FIXED = 0x10  # of Linux, macOS and FreeBSD; Python's mmap lacks it
STAGING_BYTES = 16 * 1024 * 1024  # of a node, whatever the number of ranks; a container may have 64 MB in all
SPARE_BYTES = 512 * 1024  # left free for MPI, for each rank: some libraries reserve no pages before they write

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_system.mmap.restype = ctypes.c_void_p
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def shared_rows(comm: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """Return zeros of shape (ranks, nbytes), dtype uint8: rows that all ranks read and write. Collective.

    The ranks of `comm` share a node. Raises UnavailableError on all of them if the memory is not available.
    """
    row = _whole_pages(nbytes)  # no page belongs to two ranks
    return _map(comm, row * comm.size).reshape(comm.size, row)[:, :nbytes]


def shared_array(comm: MPI.Intracomm, length: int, dtype: np.dtype) -> np.ndarray:
    """Return one 1-D array of zeros that all ranks map as the same bytes. Collective, with the errors of `shared_rows`.

    An element that any rank writes, all ranks read after a barrier.
    """
    nbytes = length * dtype.itemsize
    return _map(comm, _whole_pages(nbytes))[:nbytes].view(dtype)


def _whole_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES


def _map(comm: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """Return zeroed whole pages that all ranks map; every view of the array keeps them mapped. Collective."""
    # All ranks know the name before the file exists, so each can remove it if another one dies.
    mine = [f"allreduce-{secrets.token_hex(16)}", _lacking(nbytes, comm.size)]
    name, lacking = root_value(comm, mine, "share the name of a shared segment")
    if lacking:
        raise on_all_ranks(UnavailableError(lacking), comm)
    path = os.path.join(SHARED_MEMORY, name)
    pages = chunk(nbytes // PAGE_BYTES, comm.size, comm.rank)  # allocated near the rank that touches them
    try:
        memory = together(comm, lambda: _claim(path, nbytes, pages, comm.size))
    finally:
        with suppress(FileNotFoundError):  # another rank has removed it
            os.unlink(path)
    memory[::PAGE_BYTES].any()  # maps other ranks' pages, many at a time; the first call would map them one by one
    return memory


def _claim(path: str, nbytes: int, pages: slice, ranks: int) -> np.ndarray:
    """Map the whole file, which only this user's processes can open, and allocate its `pages`; the first rank creates
    it. Other ranks map these pages later, when they have been moved to huge pages. Local."""
    begin, end = pages.start * PAGE_BYTES, pages.stop * PAGE_BYTES
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, nbytes)  # the first rank sets the size
            if end > begin and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, begin, end - begin)
            if lacking := _lacking(nbytes, ranks, allocated=True):
                raise UnavailableError(lacking)
            memory = _mapping(file, nbytes)
        finally:
            os.close(file)
    except (OSError, OverflowError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        raise UnavailableError(_lacking(nbytes, ranks, full=True) if full else NOT_SHARED.format(error)) from error
    memory[begin:end:PAGE_BYTES] = 0
    if nbytes >= huge_pages.SHORTEST:
        huge_pages.move(MPI.Get_address(memory) + begin, end - begin)
    return memory


def _mapping(file: int, nbytes: int) -> np.ndarray:
    """Map a file as a byte array, until its last view is gone. (mmap.mmap would hold a file descriptor as long.)

    It begins where a huge page can begin; Linux itself aligns files in memory only if they are to get huge pages.
    """
    reserved = nbytes + huge_pages.HUGE
    begin = _mmap(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        address = -(-begin // huge_pages.HUGE) * huge_pages.HUGE
        _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, file)
        buffer: Any = MPI.buffer.fromaddress(address, nbytes)
        memory = np.frombuffer(buffer, np.uint8)
    except BaseException:
        _system.munmap(begin, reserved)
        raise
    weakref.finalize(memory, _system.munmap, begin, reserved).atexit = False
    return memory


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, file: int) -> int:
    """Return the address of a new mapping. Raises OSError. Local."""
    mapped: int = _system.mmap(address, nbytes, protection, flags, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _lacking(nbytes: int, ranks: int, allocated: bool = False, full: bool = False) -> str:
    """Return why there is no room for a file and for MPI's reserve, without which MPI crashes with a bus error; "" if
    there is. allocated: the file has its room. full: the system has said so. Local."""
    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return NOT_SHARED.format(error)
    free, reserve = space.f_bavail * space.f_frsize, ranks * SPARE_BYTES
    if free >= nbytes * (not allocated) + reserve and not full:
        return ""
    return (
        f"shared memory is too small: {(nbytes + reserve) / 2**20:.1f} MiB are needed for {ranks} ranks and "
        f"{SHARED_MEMORY} has {free / 2**20:.1f} MiB free; enlarge it (docker run --shm-size=8g, or "
        f"mount -o remount,size=8g {SHARED_MEMORY}) or use another backend, such as ring"
    )
