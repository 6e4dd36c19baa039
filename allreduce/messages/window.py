"""Memory that the ranks of a node share: an MPI-3 window, its lifetime and its fence."""

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk
from allreduce.errors import UnavailableError, raise_together

SHARED_MEMORY = "/dev/shm"  # where MPI libraries on Linux keep shared windows
PAGE_BYTES = 4096
SPARE_BYTES = 1 << 20  # left free for the MPI library itself


class Window:
    """`nbytes` zeroed bytes on each rank of a communicator whose ranks share a node. Collective."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        raise_together(comm, _lack_of_space(comm, nbytes))
        self._comm = comm
        whole_pages = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES  # so that every rank's part begins with a page
        self._win = MPI.Win.Allocate_shared(whole_pages, 1, comm=comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)  # Win.Sync is defined inside an epoch only
        memory: list[Any] = [self._win.Shared_query(rank)[0] for rank in range(comm.size)]
        self._memory = memory[comm.rank]
        self.ranks = [np.frombuffer(each, dtype=np.uint8, count=nbytes) for each in memory]
        mine = self.ranks[comm.rank]
        mine[:] = 0  # the first touch also places the pages near the rank that owns them
        self.address = MPI.Get_address(mine)  # of this rank's part, which ends before `end`
        self.end = self.address + nbytes
        self._given: weakref.ref[np.ndarray] | None = None
        self.fence()

    def give(self) -> np.ndarray:
        """This rank's part, as bytes, for use outside: the window knows as long as a view of it lives."""
        given = np.frombuffer(self._memory, dtype=np.uint8, count=self.end - self.address)
        self._given = weakref.ref(given)
        return given

    def in_use(self) -> bool:
        """True while this rank has an array in its part that `give` gave."""
        return self._given is not None and self._given() is not None

    def fence(self) -> None:
        """Everything written to the window before, by any rank, is seen by all ranks afterwards. Collective."""
        _fence(self._comm, self._win)

    def free(self) -> None:
        """Give the memory back, unless an array of some rank still lies in it. Collective."""
        self.ranks = []
        _release(self._comm, self._win, self.in_use())


class CommonWindow:
    """One 1-D array of `length` zeros that all ranks of a communicator map as the same bytes. Collective.

    The ranks of `comm` must share a node. A `Window` gives every rank memory of its own that others can
    reach; here there is one memory, and what any rank writes is what all of them read after a `fence`.
    """

    def __init__(self, comm: MPI.Intracomm, length: int, dtype: np.dtype) -> None:
        nbytes = length * dtype.itemsize
        raise_together(comm, _lack_of_space(comm, nbytes if comm.rank == 0 else 0))
        self._comm = comm
        self._win = MPI.Win.Allocate_shared(max(nbytes, 1) if comm.rank == 0 else 0, 1, comm=comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        memory: Any = self._win.Shared_query(0)[0]
        owner = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
        self.array = owner.view(dtype)
        self.array[chunk(length, comm.size, comm.rank)] = 0  # places the pages near the rank that touches them
        self._in_use = weakref.ref(owner)  # every view of the array keeps this one alive
        self.fence()

    def fence(self) -> None:
        """Everything written to the array before, by any rank, is seen by all ranks afterwards. Collective."""
        _fence(self._comm, self._win)

    def free(self) -> None:
        """Give the memory back, unless an array of some rank still lies in it. Collective."""
        del self.array
        _release(self._comm, self._win, self._in_use() is not None)


def still_in_use(comm: MPI.Intracomm, windows: Sequence[Window]) -> list[bool]:
    """For each window, whether an array of any rank lies in it. Collective."""
    flags = np.array([window.in_use() for window in windows], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, flags, MPI.MAX)
    return [bool(flag) for flag in flags]


def _fence(comm: MPI.Intracomm, win: MPI.Win) -> None:
    """What the MPI standard asks for between a write and another rank's read."""
    win.Sync()
    comm.Barrier()
    win.Sync()


def _release(comm: MPI.Intracomm, win: MPI.Win, in_use: bool) -> None:
    """Free a window, unless some rank still uses its memory; then it stays until the process ends. Collective."""
    held = np.array([in_use], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, held, MPI.MAX)
    win.Unlock_all()
    if not held[0]:
        win.Free()


def _lack_of_space(comm: MPI.Intracomm, nbytes: int) -> UnavailableError | None:
    """Writing to a window beyond the space in /dev/shm kills the process, so look first. Collective."""
    wanted = comm.allreduce(nbytes + PAGE_BYTES) + SPARE_BYTES
    try:
        space = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None  # this MPI library keeps its windows somewhere else
    free = space.f_bavail * space.f_frsize
    if free >= wanted:
        return None
    return UnavailableError(
        f"shared memory is too small: {wanted / 2**20:.1f} MiB are needed for {comm.size} ranks and "
        f"{SHARED_MEMORY} has {free / 2**20:.1f} MiB free; enlarge it (docker run --shm-size=8g, or "
        f"mount -o remount,size=8g {SHARED_MEMORY}) or use another backend, ring say"
    )
