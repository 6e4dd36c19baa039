"""Runs the operations of a process group in its topology's worker, in the order of submission.

That order is the order of the program, and the group is its topology's only user, so it is announced to nobody.
An operation begins when all ranks have come to it, which is waited for asleep, and ranks that came to different ones
hear of it. While the worker communicates, backward goes on in the caller's thread.
"""

import threading
import time
import weakref
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

from allreduce import children, notices
from allreduce.errors import UnavailableError
from allreduce.messages import losses
from allreduce.messages.agreement import all_values, disagreement
from allreduce.messages.lanes import Lane
from allreduce.messages.notes import Said
from allreduce.messages.waiting import asleep
from allreduce.topology import Topology
from allreduce.torch_backend.work import TimedOut, Work

WATCH_SECONDS = 0.5  # how often a watchdog looks; a timeout is noticed this much late at the most


class Executor:
    """A lane of the worker, with a time-out for each operation. Creating it is collective.

    name: of the group. threaded: False runs every operation at once, in the caller's thread; so does an MPI
        library without MPI_THREAD_MULTIPLE.

    An operation that is submitted from a callback of another one (a comm hook that chains collectives by
    `Future.then`, as PowerSGD's does) runs at once: so its place in the order does not depend on timing.
    """

    def __init__(self, topology: Topology, name: str, threaded: bool = True) -> None:
        self.broken: Exception | None = None  # set when an operation has timed out or the group is destroyed
        self.submitted = 0
        self._watch, self._notes = topology.watch, topology.watch.notes
        self._place = topology.place()
        self._place.raises = True
        self._comm = topology.private(wait=self._place)
        self._meeting: list[object] = []  # MPI may still know of it when it was given up
        self._threaded = threaded
        self._lane = self._enter(topology, f"process group {name}")
        self._lock = threading.Lock()
        self._unfinished: dict[Work, None] = {}  # in the order of submission
        self._since = 0.0  # when the first of them became the first
        self._inside: int | None = None  # the thread that runs an operation
        if self._threaded:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="allreduce deadlines", daemon=True).start()

    def submit(self, work: Work, action: Callable[[], None]) -> Work:
        """Have `action` executed after all that was submitted before; `work` ends with it."""
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self.submitted += 1
        if self._inside == threading.get_ident():
            self._execute(work, action)
            return work
        with self._lock:
            if not self._unfinished:
                self._since = time.monotonic()
            self._unfinished[work] = None
        try:
            pending = self._lane.submit(partial(self._execute, work, action), ended=partial(self._ended, work))
        except Exception:  # the lane is closed
            self._ended(work, None)
            raise
        if not self._threaded:
            pending.wait()
        return work

    def close(self, limit: float) -> bool:
        """End after all that was submitted. False when the other ranks' end takes over `limit` seconds.

        An operation that somebody has waited for in vain is not waited for again, and zero waits for nobody.
        """
        waiting = limit > 0 and not any(work.given_up for work in self._unfinished)
        try:
            if waiting:
                self.submit(Work("destroy_process_group", [], limit), lambda: None).wait()
        except Exception:
            waiting = False
        self.fail(RuntimeError("this process group has been destroyed"))
        return waiting

    def fail(self, error: Exception) -> None:
        """End the running operation and all that wait with `error`, and refuse later ones."""
        with self._lock:
            self.broken = self.broken or error
            works = list(self._unfinished)
        self._lane.abandon()  # first: what is chained to the futures runs here, and may wait for any of them
        for work in reversed(works):
            work.end(error)

    def check_deadline(self) -> None:
        """Fail when the first operation is over its time."""
        with self._lock:
            work = next(iter(self._unfinished), None)
            late = work is not None and time.monotonic() > self._since + work.limit
        if work is not None and late:
            self.fail(self._late(work))

    def _enter(self, topology: Topology, name: str) -> Lane:
        if self._threaded:
            try:
                return topology.worker.lane(name, threaded=True, alone=True)
            except UnavailableError:
                notices.once(
                    topology.rank,
                    "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward",
                )
                self._threaded = False
        return topology.worker.lane(name, alone=True)

    def _execute(self, work: Work, action: Callable[[], None]) -> None:
        """Run an operation, and what is chained to its future."""
        outer, self._inside = self._inside, threading.get_ident()
        error: Exception | None = None
        try:
            with self._watch.hearing():
                self._meet(work)
                action()
        except Exception as raised:
            error = raised
            if losses.lost(raised) is not None:
                self.fail(raised)  # no operation can be done any more, also none of those that wait already
        work.end(error)
        self._inside = outer

    def _meet(self, work: Work) -> None:
        """Wait asleep until all ranks have come to this operation, or until this one gives it up."""
        if self._comm.size == 1:
            return
        what = work.described
        word = zlib.crc32(what.encode())
        sides = np.array([word, -word])  # the minimum of -x is minus the maximum
        request = self._comm.Iallreduce(MPI.IN_PLACE, sides, MPI.MIN)
        self._meeting = [request, sides]

        def over() -> bool:
            return request.Test() or self.broken is not None or self._place.error is not None

        self._place.begin(Said(f"{what} of {self._lane.name}"))
        try:
            if not asleep(over, work.limit):
                self.fail(self._late(work))
            if self._place.error is not None:  # a rank has left
                self.fail(self._place.error)
        finally:  # MPI raises when a rank was lost
            self._place.end()
        if self.broken is not None:
            raise self.broken
        if sides[0] != -sides[1]:
            raise disagreement(self._comm, all_values(self._comm, what, "learn what the ranks have called"))

    def _ended(self, work: Work, error: BaseException | None) -> None:
        """The lane is done with an operation, or has given it up."""
        if error is not None:
            given_up = error if isinstance(error, Exception) else RuntimeError(repr(error))
            work.end(self.broken or given_up)
        with self._lock:
            self._unfinished.pop(work, None)
            self._since = time.monotonic()

    def _late(self, work: Work) -> TimedOut:
        what = f"what was chained to the future of {work.name}" if work.is_completed() else work.name
        text = (
            f"{what} was not done within {work.limit:g} s (the timeout of the group or of the call): another rank is "
            "late, hangs, or never called it. The group can't be used any more"
        )
        call = self._place.call
        return TimedOut(text if call is None else f"{text}\n{self._notes.table(call)}")


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
