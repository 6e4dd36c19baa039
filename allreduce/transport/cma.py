"""CMA: reads and writes the ordinary memory of the other ranks of a node, with one copy and no message.

CMA is Linux's cross-memory attach (C. Yeoh, 2012): process_vm_readv and process_vm_writev. MPI libraries use it for
large messages. It works between processes of one user, unless a container or the system (Yama's ptrace_scope) forbids
it.
"""

import ctypes
import os
import secrets
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.transport import huge_pages
from allreduce.transport.wait import waiting

MOST = 1024  # arrays whose calls are counted


class _Span(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _call(name: str) -> Any:
    """Return a function of the C library; None if it has none of this name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        span = ctypes.POINTER(_Span)
        function.argtypes = [ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong]
        function.restype = ctypes.c_ssize_t
    return function


_read, _write = _call("process_vm_readv"), _call("process_vm_writev")


class CMA:
    """Reads and writes the memory of the other ranks of a node. The constructor is collective.

    works: whether this rank can access every rank. The topology then makes it the same on all ranks of the node.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._rank = comm.rank
        self._calls: dict[tuple[int, int], int] = {}  # by address and length of an array
        self._secret = np.array([secrets.randbits(62)], np.int64)  # here for as long as other ranks read it
        mine = np.array([os.getpid(), MPI.Get_address(self._secret), self._secret[0]], np.int64)
        everyone = np.empty((comm.size, 3), np.int64)
        with waiting(comm, "exchange addresses"):
            comm.Allgather(mine, everyone)
        self._pids = everyone[:, 0].tolist()
        self.works = all(self._can_access(rank, *row) for rank, row in enumerate(everyone[:, 1:].tolist()))

    def address(self, array: np.ndarray) -> int:
        """Return an array's address for other ranks; 0 for memory that they can't access, such as some devices'."""
        begin, byte = MPI.Get_address(array), np.empty(1, np.uint8)
        last = begin + array.nbytes - 1
        if not all(_move(_read, self._pids[self._rank], at, byte) == 1 for at in (begin, last)):
            return 0
        self._count_call(begin, array.nbytes)
        return begin

    def _count_call(self, address: int, nbytes: int) -> None:
        """Count a call with an array that other ranks access; move it to huge pages at its call 2, 4, 8, 16 ... Local.

        A later move takes what the system had no huge pages for before. Only pages that the array fills are moved.
        """
        if nbytes < huge_pages.SHORTEST:
            return
        if len(self._calls) >= MOST:
            self._calls.clear()
        self._calls[address, nbytes] = calls = self._calls.get((address, nbytes), 0) + 1
        if calls > 1 and calls & (calls - 1) == 0:
            huge_pages.move(address, nbytes)

    def read(self, rank: int, address: int, into: np.ndarray) -> None:
        """Fill a 1-D array from a rank's memory."""
        self._move(_read, rank, address, into)

    def write(self, rank: int, address: int, array: np.ndarray) -> None:
        """Copy a 1-D array into a rank's memory."""
        self._move(_write, rank, address, array)

    def _move(self, function: Any, rank: int, address: int, array: np.ndarray) -> None:
        memory, done = array.view(np.uint8), 0
        while done < memory.size:  # Linux moves at most 2 GiB in a call
            moved = _move(function, self._pids[rank], address + done, memory[done:])
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise CommunicationError(f"the memory of rank {rank} of this node is no longer accessible: {reason}")
            done += moved

    def _can_access(self, rank: int, address: int, secret: int) -> bool:
        """Return whether this rank can read a rank's secret, and write it back. Local.

        The secret identifies the process: in another PID namespace a rank's pid may be that of another process.
        """
        found = np.zeros(1, np.int64)
        pid = self._pids[rank]
        is_it = _move(_read, pid, address, found) == found.nbytes and int(found[0]) == secret
        return is_it and _move(_write, pid, address, found) == found.nbytes


def _move(function: Any, pid: int, address: int, array: np.ndarray) -> int:
    """Copy bytes from or to a process; return how many were copied, or a negative number after an error. Local."""
    if function is None:
        return -1
    here, there = _Span(MPI.Get_address(array), array.nbytes), _Span(address, array.nbytes)
    return function(pid, here, 1, there, 1, 0)
