"""Roll call: before ranks do something together they see that all of them are about to do the same.

The classic hang of data-parallel loops is a rank that skips a step (`if loss.isnan(): continue`): the
others wait for gradients that never come. With a roll call before each collective all ranks raise a
DisagreementError that says where each of them is, and a rank that is merely late is named in a warning.
"""

import atexit
import sys
import time
import weakref
import zlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from allreduce.errors import AllReduceError
from allreduce.messages.agreement import agree


class RollCall:
    """Counts what this rank has done and compares it with the others, on a communicator of its own."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.averages = 0  # of gradients, begun
        self.steps = 0  # updates, done
        self.broken = False  # a call has failed, so the ranks may be anywhere
        self.closed = False
        atexit.register(_end, weakref.ref(self))

    def __call__(self, what: str) -> None:
        """Return when all ranks have come to `what` with equal counts. Collective.

        Raises DisagreementError on all ranks when they have not.
        """
        if self._comm.size == 1:
            return
        row = f"{what}, after {self.steps} steps and {self.averages} averages of gradients"
        numbers = [zlib.crc32(what.encode()), self.steps, self.averages]
        try:
            agree(self._comm, numbers, row, None)
        except BaseException:
            self.broken = True
            raise

    def any(self, values: Sequence[bool]) -> np.ndarray:
        """For each value whether it is true on any rank. Collective."""
        found = np.array(values, dtype=np.uint8)
        if self._comm.size > 1:
            self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return found

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks, the same bits on each. Collective."""
        total = np.array([value], dtype=np.float64)
        self._comm.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
        return float(total[0]) / self._comm.size


def _end(reference: "weakref.ref[RollCall]") -> None:
    """A program that ends on one rank, while others still train, is told to them, not waited for."""
    rollcall = reference()
    if rollcall is None or rollcall.closed or rollcall.broken or MPI.Is_finalized() or not rollcall._comm:
        return
    try:
        rollcall("the program has ended")
    except AllReduceError as error:
        time.sleep(2)  # ranks that still train raise it with their tracebacks, and end the job while we sleep
        sys.stderr.write(f"rank {rollcall._comm.rank}: {error}\n")
        rollcall._comm.Abort(1)
