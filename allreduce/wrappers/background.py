"""Background: the calls of another backend run in one thread, so that computation goes on meanwhile.

MPI mostly moves data only while some thread is inside of an MPI call, so overlap needs a thread; and
collectives match by their order, so there is one thread, and it takes calls in the order of submission.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays.ops import Op
from allreduce.base import AllReduce
from allreduce.errors import UnavailableError, raise_together
from allreduce.messages.waiting import meet_asleep
from allreduce.topology import Topology


def crowded(topology: Topology) -> bool:
    """True where some node has no core to spare for a second thread of each of its ranks. Collective."""
    return bool(topology.world.allreduce((os.cpu_count() or 1) < 2 * topology.node_size, MPI.LOR))


class Pending:
    """A call that was submitted. `begin` and `end` are its times by time.perf_counter(), in seconds.

    Run in the background it begins when all ranks have come to it, so the time does not hold that of others.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.begin = self.end = 0.0

    def run(self) -> None:
        """Do the work in the calling thread; what it raises is kept for `wait`."""
        self.begin = time.perf_counter()
        try:
            self._work()
        except BaseException as error:  # a thread has nobody else to tell
            self._error = error
        self.end = time.perf_counter()
        self._done.set()

    def done(self) -> bool:
        """True when the call has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the call to end, and raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Background(AllReduce):
    """Wraps a backend, whose calls it runs in a thread of its own. Creating it is collective.

    inner: the backend. It stays the caller's, who closes it after the wrapper.

    `submit` returns at once; calling it as any other backend submits and waits. All ranks submit the same
    calls in the same order (the index of a bucket, never its readiness). Until a call has ended its buffer
    belongs to it, and the backend must be used through the wrapper only.

    Raises UnavailableError on all ranks when MPI was not started with MPI_THREAD_MULTIPLE on all of them.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce) -> None:
        error = None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else UnavailableError(_SINGLE)
        raise_together(topology.world, error)
        super().__init__(topology, check="never")  # the inner backend checks
        self.inner = inner
        self.name = inner.name
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"allreduce {inner.name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> Pending:
        """Have the thread call `work`, after everything that was submitted before. Not to be waited for inside."""
        self._check_open()
        pending = Pending(work)
        self._queue.put(pending)
        return pending

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        self.submit(lambda: self.inner(buffer, op)).wait()

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            meet_asleep(self._comm)  # until all ranks have come so far; the call's own waiting would poll
            pending.run()
            del pending  # its buffer is the caller's again

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return self.inner._allocate(length, dtype, device)

    def _memory(self, buffer: Any) -> int:
        return self.inner._memory(buffer)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self.inner._reduce(buffer, op)

    def _close(self) -> None:
        self._queue.put(None)
        self._thread.join()


_SINGLE = (
    "background reduction needs an MPI that was started with MPI_THREAD_MULTIPLE; mpi4py asks for it by itself "
    "unless mpi4py.rc.threads or mpi4py.rc.thread_level were changed, so this MPI library does not offer it"
)
