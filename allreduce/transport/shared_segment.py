"""Shared segments: memory that the ranks of a node share, one file in memory that all of them map.

- The file has a name only until all ranks have opened it, so no file is left, however a process ends.
- Its pages are allocated before they are touched: too small a /dev/shm is an error, never a bus error.
- A mapping lives as long as the last array in it, and the memory as long as the last mapping. So freeing it needs no
  other rank. (A window of MPI can only be freed by all ranks together: an array that outlived its backend held it for
  ever.)
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

from allreduce.arrays.chunks import chunk, segment
from allreduce.errors import UnavailableError
from allreduce.transport.control import raise_together, root_value, together
from allreduce.transport.wait import wait_for

SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
PAGE_BYTES = mmap.PAGESIZE
SPARE_BYTES = 512 * 1024  # for each rank, left free for the MPI library: some allocate nothing before they write

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_system.mmap.restype = ctypes.c_void_p
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SharedSegment:
    """`nbytes` zeroed bytes for each rank of a communicator whose ranks share a node. Collective.

    nbytes: the same on all ranks.

    Raises UnavailableError on all ranks of `comm` where the memory can't be had.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self._comm = comm
        self._nbytes = nbytes
        self._part = _whole_pages(nbytes)  # no page belongs to two ranks
        self._memory: np.ndarray | None = _map(comm, self._part * comm.size)
        self._alive = weakref.ref(self._memory)
        self.address = MPI.Get_address(self._memory) + comm.rank * self._part  # of this rank's bytes
        self.end = self.address + nbytes

    @property
    def ranks(self) -> np.ndarray | None:
        """All ranks' bytes as an array of shape (ranks, nbytes), dtype uint8; None once they are freed."""
        memory = self._alive()
        return None if memory is None else memory.reshape(self._comm.size, self._part)[:, : self._nbytes]

    def give(self) -> np.ndarray:
        """This rank's bytes. From now on the segment lives on this rank as long as the last view of them."""
        assert self._memory is not None
        given = self._memory.reshape(self._comm.size, self._part)[self._comm.rank, : self._nbytes]
        self._memory = None
        return given

    def alive(self) -> bool:
        """True until the last view of the bytes that `give` returned is gone."""
        return self._alive() is not None

    def fence(self) -> None:
        """Everything written to the segment before, by any rank, is seen by all ranks afterwards. Collective."""
        # A rank leaves a barrier between processes of one machine only after it has seen what the others wrote before
        # they entered: the barrier uses atomics in shared memory, or system calls, and both order earlier writes.
        self._comm.Barrier()


class CommonSegment:
    """One 1-D array of `length` zeros that all ranks of a communicator map as the same bytes. Collective.

    The ranks of `comm` must share a node. A `SharedSegment` gives every rank memory of its own that others can
    reach; here there is one memory, and what any rank writes is what all of them read after a `fence`.

    Raises UnavailableError on all ranks of `comm` where the memory can't be had.
    """

    def __init__(self, comm: MPI.Intracomm, length: int, dtype: np.dtype) -> None:
        self._comm = comm
        nbytes = length * dtype.itemsize
        self.array = _map(comm, _whole_pages(nbytes))[:nbytes].view(dtype)

    def fence(self) -> None:
        """Everything written to the array before, by any rank, is seen by all ranks afterwards. Collective."""
        wait_for(self._comm, self._comm.Ibarrier(), "the fence of memory that ranks have in common")

    def free(self) -> None:
        """Let go of the memory, which lives as long as the last array in it, of any rank. Local."""
        del self.array


def _whole_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES


def _map(comm: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """`nbytes` zeroed bytes that all ranks map: whole pages. Every view of the array keeps it alive. Collective."""
    name = f"allreduce-{secrets.token_hex(16)}"  # of rank 0's
    path = os.path.join(SHARED_MEMORY, root_value(comm, name, "learn where memory is that ranks have in common"))
    raise_together(comm, None)  # all ranks know the name before the file exists, and can remove it when rank 0 dies
    mine = chunk(nbytes // PAGE_BYTES, comm.size, comm.rank)  # pages: allocated near the rank that touches them
    try:
        together(comm, lambda: _create(path, nbytes, comm.size) if comm.rank == 0 else None)
        memory = together(comm, lambda: _claim(path, nbytes, mine, comm.size))
    except BaseException:
        _remove(path)
        raise
    if comm.rank == 0:
        _remove(path)
    memory[::PAGE_BYTES].any()  # maps the others' pages, many at a time; the first call would map them one by one
    return memory


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _create(path: str, nbytes: int, ranks: int) -> None:
    """Make an empty file that only this user's processes can open."""
    try:
        _see_space(nbytes, ranks)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _unavailable(error, nbytes, ranks) from error


def _claim(path: str, nbytes: int, pages: slice, ranks: int) -> np.ndarray:
    """Map the whole file, and allocate its `pages`."""
    begin, end = pages.start * PAGE_BYTES, pages.stop * PAGE_BYTES
    try:
        file = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(file, nbytes)  # the first rank sets the size
            if end > begin and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, begin, end - begin)
            _see_space(0, ranks)
            memory = _mapping(file, nbytes)
        finally:
            os.close(file)
    except (OSError, OverflowError) as error:
        raise _unavailable(error, nbytes, ranks) from error
    memory[begin:end:PAGE_BYTES] = 0
    return memory


def _mapping(file: int, nbytes: int) -> np.ndarray:
    """A file as bytes, mapped until the last view of them is gone. (mmap.mmap holds a file descriptor as long.)"""
    address = _system.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    buffer: Any = MPI.buffer.fromaddress(address, nbytes)
    memory = np.frombuffer(buffer, np.uint8)
    weakref.finalize(memory, _system.munmap, address, nbytes).atexit = False
    return memory


def _see_space(nbytes: int, ranks: int) -> None:
    """Raise OSError unless `nbytes` are free, and what MPI needs besides; without it, MPI dies of bus errors."""
    space = os.statvfs(SHARED_MEMORY)
    if space.f_bavail * space.f_frsize < nbytes + ranks * SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unavailable(error: Exception, nbytes: int, ranks: int) -> UnavailableError:
    if not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return UnavailableError(f"the ranks can't share memory in {SHARED_MEMORY} ({error}); use another, ring say")
    space = os.statvfs(SHARED_MEMORY)
    wanted, free = nbytes + ranks * SPARE_BYTES, space.f_bavail * space.f_frsize
    return UnavailableError(
        f"shared memory is too small: {wanted / 2**20:.1f} MiB are needed for {ranks} ranks and "
        f"{SHARED_MEMORY} has {free / 2**20:.1f} MiB free; enlarge it (docker run --shm-size=8g, or "
        f"mount -o remount,size=8g {SHARED_MEMORY}) or use another backend, ring say"
    )


LEAST_BYTES = 512 * 1024
LARGEST_BYTES = 16 * 1024 * 1024  # of a node, whatever the number of ranks; a container may have 64 MB in all
CACHE_LINE = 64
# Arrays tend to begin at the start of a page. Copies between equal offsets in pages are slow on many processors (AMD's
# Zen 4: twice as slow), so the slots begin in the middle of a page.
OFFSET = 2048


def wanted_bytes(nbytes: int, ranks: int) -> int:
    """The size of a staging buffer through which an array of `nbytes` passes in two turns; at most LARGEST_BYTES.

    A third turn would write slots that their last reader still has in its cache. Where ranks share no cache, that takes
    twenty times as long as a copy: 27 ns a line between the complexes of an EPYC.
    """
    return min(1 << max(nbytes * ranks - 1, 1).bit_length(), LARGEST_BYTES)


class StagingBuffer:
    """A table of slots in `nbytes` of shared memory in all, through which arrays pass. Collective.

    Raises UnavailableError on all ranks of `comm` where the memory can't be had.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.rank, self.size, self.nbytes = comm.rank, comm.size, nbytes
        slots = 2 * self.size
        # Whole cache lines, so that segments of every dtype are aligned.
        self.slot_bytes = max(nbytes // (self.size * slots * CACHE_LINE), 1) * CACHE_LINE
        memory = SharedSegment(comm, OFFSET + slots * self.slot_bytes).ranks
        assert memory is not None
        self.table = memory[:, OFFSET:].reshape(self.size, 2, self.size, self.slot_bytes)
        self.turn = 0  # of all calls so far


class StagedArray:
    """One 1-D array on its way through the table. Local."""

    def __init__(self, stage: StagingBuffer, array: np.ndarray) -> None:
        self._stage, self._array = stage, array
        self._step = stage.slot_bytes // array.itemsize  # elements of a segment
        self.turns = -(-array.size // (self._step * stage.size))
        self._others = [rank for rank in range(stage.size) if rank != stage.rank]

    def put_others(self, turn: int) -> None:
        """Copy what the other ranks reduce into the table; nothing after the last turn."""
        for other in self._others:
            np.copyto(self._slot(turn, self._stage.rank, other), self._array[self._span(turn, other)])

    def own(self, turn: int) -> np.ndarray:
        """The segment that this rank reduces, in the array itself."""
        return self._array[self._span(turn, self._stage.rank)]

    def contributions(self, turn: int) -> list[np.ndarray]:
        """All ranks' segments of this rank's chunk; its own is in the array."""
        mine = self._stage.rank
        ranks = range(self._stage.size)
        return [self.own(turn) if rank == mine else self._slot(turn, rank, mine) for rank in ranks]

    def put_own(self, turn: int) -> None:
        """Copy what this rank has reduced into the table; nothing after the last turn."""
        np.copyto(self._slot(turn, self._stage.rank, self._stage.rank), self.own(turn))

    def get_others(self, turn: int) -> None:
        """Copy what the other ranks have reduced out of the table."""
        for other in self._others:
            np.copyto(self._array[self._span(turn, other)], self._slot(turn, other, other))

    def end(self) -> None:
        """Leave the table to the next array. All ranks have made the same turns."""
        self._stage.turn += self.turns

    def _span(self, turn: int, rank: int) -> slice:
        return segment(chunk(self._array.size, self._stage.size, rank), self._step, turn)

    def _slot(self, turn: int, rank: int, part: int) -> np.ndarray:
        span = self._span(turn, part)
        nbytes = (span.stop - span.start) * self._array.itemsize
        return self._stage.table[rank, (self._stage.turn + turn) % 2, part, :nbytes].view(self._array.dtype)
