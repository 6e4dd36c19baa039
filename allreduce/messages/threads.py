"""Threads that communicate: whether MPI lets there be any, and what becomes of them at the end of a program."""

import atexit
import weakref
from typing import Protocol

from mpi4py import MPI

from allreduce import children, ending
from allreduce.errors import UnavailableError

EXIT_SECONDS = 10.0  # the end of a program waits so long for calls that are under way


class Runs(Protocol):
    """A worker, whose thread must be out of MPI when that ends."""

    @property
    def threaded(self) -> bool: ...

    def idle(self, limit: float) -> bool: ...

    def close(self) -> None: ...


running: "weakref.WeakSet[Runs]" = weakref.WeakSet()


def multiple() -> bool:
    """Whether several threads may communicate. Local."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def refused() -> UnavailableError | None:
    """Why there can be no thread that communicates; None when there can. Local."""
    if multiple():
        return None
    return UnavailableError(
        "a thread that communicates needs an MPI that was started with MPI_THREAD_MULTIPLE; mpi4py asks for it by "
        "itself unless mpi4py.rc.threads or mpi4py.rc.thread_level were changed, so this MPI library does not offer it"
    )


@atexit.register
def _end() -> None:
    """MPI can't be finalised while a thread is inside of it: wait a little, then end the job."""
    if children.forked():  # it has a copy of the workers, and none of their threads
        return
    for worker in list(running):
        if worker.threaded and not MPI.Is_finalized():
            if not worker.idle(EXIT_SECONDS):
                ending.end_job("a collective still hangs at the end of the program; MPI_Abort ends the job\n", 1)
            worker.close()
