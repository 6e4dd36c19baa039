"""The operations of a process group: Work, which the caller waits for, and the Executor, which runs them in order.

torch.distributed.Work and torch.futures.Future are PyTorch's own classes, so DDP's C++ reducer, comm
hooks and `dist.batch_isend_irecv` take these for any backend's.
"""

import functools
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from allreduce import notices
from allreduce.engine.lane import Lane
from allreduce.engine.queue import Worker
from allreduce.errors import UnavailableError
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.torch_backend.checks import NAME
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, disagreement
from allreduce.transport.wait import Said, wait_until

WATCH_SECONDS = 0.5  # how often a watchdog looks; a timeout is noticed this much late at the most

ClassT = TypeVar("ClassT", bound=type)

# Raised by work.wait() when an operation took too long; a RuntimeError, like all errors of torch.distributed.
TimedOut = dist.DistBackendError


def seconds(timeout: timedelta | float | None, default: float) -> float:
    """A timeout of PyTorch's in seconds; none, zero and the negative "unset" of its options mean `default`."""
    given = 0.0 if timeout is None else exact_seconds(timeout)
    return given if given > 0 else default


def exact_seconds(timeout: timedelta | float) -> float:
    """A timeout of PyTorch's in seconds, zero too."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def untraced(kind: ClassT) -> ClassT:
    """Have the methods of a class run as they are when compiled code calls them: the graph breaks there."""
    for name, value in list(vars(kind).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("__"):
            setattr(kind, name, _hidden(value))
    return kind


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    hidden = torch._disable_dynamo(method)  # imports Dynamo when it is called: seconds that plain programs save

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return call


@untraced
class Work(dist.Work):
    """One operation of a group, from its submission to its end.

    name: what it is, for messages. result: the tensors that it writes. limit: seconds that it may take.
    alike: what of its arguments must be the same on all ranks, in words that follow the name.
    """

    def __init__(self, name: str, result: Sequence[torch.Tensor], limit: float, alike: str = "") -> None:
        super().__init__()
        self.name = name
        self.described = name + alike
        self.limit = limit
        self.given_up = False  # whether somebody has waited for it in vain
        self._result = list(result)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        self._chained: torch.futures.Future | None = None  # what others get; ends after `_future`, in the same thread
        self._event = _begin_event(name)
        self._lock = threading.Lock()

    # What PyTorch calls

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end of the operation, and raise the error that it ended with.

        Raises DistBackendError after `timeout`, while the operation goes on. Without one it is the
        executor that ends an operation after its own limit.
        """
        limit = seconds(timeout, 0.0)
        if not self._ended.wait(limit or None):
            self.given_up = True
            raise TimedOut(f"{self.name} was not done within {limit:g} s: another rank is late, or never called it")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation has written. Waits for it."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A Future of the list of written tensors; of a RuntimeError that names the error where there is one."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=[*{each.device for each in self._result if each.is_cuda}])
                # An exception that is set is to C++ (DDP's reducer) a result, which it takes for tensors: the process
                # crashes. What a callback raises is an error there too.
                self._chained = self._future.then(lambda future: future.value())
                if self._ended.is_set():
                    self._set(self._future)
            assert self._chained is not None
            return self._chained

    # What the executor calls

    def end(self, error: Exception | None = None) -> None:
        """Mark the operation as ended. What was chained to the future runs now, in the calling thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            if self._event is not None:
                self._event.set_result(None)  # before anybody who waits can end the profile
            self._ended.set()
            future = self._future
        if future is not None:
            self._set(future)

    def _set(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)


def _begin_event(name: str) -> torch.futures.Future | None:
    """Begin an event; it ends, in whatever thread, when the future that is returned gets a result.

    None where this thread is not profiled. Called where the operation is submitted, as gloo does it: what lies
    before the operation in the queue counts as its own time.
    """
    if not torch.autograd._profiler_enabled():
        return None
    ended: torch.futures.Future = torch.futures.Future()
    with torch.autograd.profiler.record_function(f"{NAME}:{name}") as event:
        event._call_end_callbacks_on_future(ended)
    return ended


@untraced
class Several(Work):
    """What other works do, which may be messages: one rank may have them and another not."""

    def __init__(self, name: str, members: Sequence[Work], limit: float) -> None:
        super().__init__(name, [], limit)
        self._members = list(members)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for each of them, and raise the first error."""
        for member in self._members:
            member.wait(timeout)
        self.end()
        return True

    def is_completed(self) -> bool:
        return all(member.is_completed() for member in self._members)


class Executor:
    """Runs the operations of a group in its topology's worker, in the order of submission. Creating it is collective.

    That order is the order of the program, and the group is its topology's only user, so nothing is announced to other
    ranks. An operation begins when all ranks have come to it; ranks that came to different ones get a
    DisagreementError. While the worker communicates, backward goes on in the caller's thread. Each operation has a
    time-out.

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
                return topology.once(Worker).lane(name, threaded=True, alone=True)
            except UnavailableError:
                notices.once(
                    topology.rank,
                    "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward",
                )
                self._threaded = False
        return topology.once(Worker).lane(name, alone=True)

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
            if ulfm.lost(raised) is not None:
                self.fail(raised)  # no operation can be done any more, also none of those that wait already
        work.end(error)
        self._inside = outer

    def _meet(self, work: Work) -> None:
        """Wait, mostly asleep, until all ranks have come to this operation, or until this one gives it up."""
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
            if not wait_until(over, work.limit):
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
