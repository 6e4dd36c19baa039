"""Runs the operations of a process group in a thread of its own, one after another, in the order of submission.

That order is the order of the program, so it is the same on all ranks, which is all that MPI asks of
collective calls on one communicator. While the thread communicates, backward goes on in the caller's.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from allreduce import children, notices
from allreduce.messages.waiting import meet_asleep
from allreduce.torch_backend.work import TimedOut, Work

EXIT_SECONDS = 10.0  # how long the end of the program waits for operations that nobody has waited for
WATCH_SECONDS = 1.0  # how often a watchdog looks; a timeout is noticed this much late at the most

Job = tuple[Work, Callable[[], None]]


class Executor:
    """The thread and the watchdog of one group.

    comm: one of the group's, on which nothing else collective goes on. threaded: False runs every operation at
        once, in the caller's thread; so does an MPI library without MPI_THREAD_MULTIPLE. crowded: there is no
        core to spare for the thread, so it waits for the other ranks asleep.

    An operation that is submitted from a callback of another one (a comm hook that chains collectives by
    `Future.then`, as PowerSGD's does) runs at once: so its place in the order does not depend on timing.
    """

    def __init__(self, comm: MPI.Intracomm, threaded: bool = True, crowded: bool = False) -> None:
        self.broken: Exception | None = None  # set when an operation has timed out or the group is destroyed
        self.submitted = 0
        self._comm, self._crowded = comm, crowded
        self._ended = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._running: tuple[Work, float] | None = None  # with the deadline for it and what is chained to it
        self._thread: threading.Thread | None = None
        if threaded and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            notices.once(
                comm.rank, "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward"
            )
            threaded = False
        if threaded:
            self._thread = threading.Thread(target=self._work, name="allreduce", daemon=True)
            self._thread.start()
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="allreduce watchdog", daemon=True).start()
        _alive.add(self)

    def submit(self, work: Work, action: Callable[[], None]) -> Work:
        """Have `action` executed after all that was submitted before; `work` ends with it."""
        at_once = self._thread is None or threading.current_thread() is self._thread
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self.submitted += 1
            if not at_once:
                self._queue.put((work, action))
        if at_once:
            self._execute(work, action)
        return work

    def stop(self) -> bool:
        """End the thread after all that was submitted. False: an operation hangs, and so does the thread."""
        if self._thread is not None:
            self._queue.put(None)
            while self._thread.is_alive() and self.broken is None:
                self._thread.join(0.1)
        if self.idle():
            _alive.discard(self)
        with self._lock:
            whole = self.broken is None
            self.broken = self.broken or RuntimeError("this process group has been destroyed")
        return whole

    def fail(self, error: Exception) -> None:
        """End the running operation and all that wait with `error`, and refuse later ones."""
        waiting = []
        with self._lock:
            self.broken = error
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            works = [job[0] for job in waiting if job is not None]
            self._ended += len(works)
            self._queue.put(None)  # the thread ends when it comes out of the running operation
        running = self._running
        for work in [running[0], *works] if running else works:
            work.end(error)

    def check_deadline(self) -> None:
        """Fail when the running operation is over its time."""
        running = self._running
        if running is not None and time.monotonic() > running[1]:
            work = running[0]
            what = f"what was chained to the future of {work.name}" if work.is_completed() else work.name
            self.fail(
                TimedOut(
                    f"{what} was not done within {work.limit:g} s (the timeout of the group or of the call): "
                    "another rank is late, hangs, or never called it. The group can't be used any more"
                )
            )

    def idle(self) -> bool:
        """True when nothing is running or waiting."""
        return self._ended == self.submitted

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._execute(*job)
            del job  # its tensors are the caller's again

    def _execute(self, work: Work, action: Callable[[], None]) -> None:
        outer, self._running = self._running, (work, time.monotonic() + work.limit)
        error: Exception | None = None
        try:
            if self._crowded and self._thread is not None:
                meet_asleep(self._comm)
            action()
        except Exception as raised:
            error = raised
        work.end(error)
        with self._lock:
            self._running = outer
            self._ended += 1


children.guard(Executor, "submit")


def _watch(reference: "weakref.ref[Executor]") -> None:
    """The watchdog: DDP waits for futures in C++, which know no timeout."""
    while True:
        time.sleep(WATCH_SECONDS)
        executor = reference()
        if executor is None or executor.broken is not None:
            return
        executor.check_deadline()
        del executor


_alive: Any = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """MPI can't be finalised while a thread is inside of it: wait a little, then end the job."""
    deadline = time.monotonic() + EXIT_SECONDS
    for executor in list(_alive):
        while not executor.idle() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not executor.idle():
            notices.log.error("allreduce: a collective still hangs at the end of the program; MPI_Abort ends the job")
            executor._comm.Abort(1)
