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
from allreduce.engine.queue import Queue, Worker
from allreduce.errors import UnavailableError
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.torch_backend.checks import NAME
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, disagreement
from allreduce.transport.wait import NamedCall, wait_until

DEADLINE_SECONDS = 0.5  # between two looks at the deadline; a time-out is noticed this much late at the most

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

    name: of the operation, for messages. result: the tensors that it writes. limit: seconds that it may take.
    alike: the arguments that must be the same on all ranks, in words that follow the name.
    """

    def __init__(self, name: str, result: Sequence[torch.Tensor], limit: float, alike: str = "") -> None:
        super().__init__()
        self.name = name
        self.call = name + alike  # compared between ranks
        self.limit = limit
        self.given_up = False  # whether a wait for it has timed out
        self._result = list(result)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        self._chained: torch.futures.Future | None = None  # given to callers; ends after `_future`, in the same thread
        self._event = _begin_event(name)
        self._lock = threading.Lock()

    # What PyTorch calls

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end of the operation, and raise the error that it ended with.

        Raises DistBackendError after `timeout`, while the operation goes on. Without a timeout the executor ends the
        operation after its own limit.
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
                # C++ (DDP's reducer) takes an exception that was set for a list of tensors, and the process crashes. An
                # error that a callback raises is an error to C++ too.
                self._chained = self._future.then(lambda future: future.value())
                if self._ended.is_set():
                    self._set(self._future)
            assert self._chained is not None
            return self._chained

    # What the executor calls

    def end(self, error: Exception | None = None) -> None:
        """Mark the operation as ended. Callbacks that were chained to the future run now, in the calling thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            if self._event is not None:
                self._event.set_result(None)  # before a waiting thread can end the profile
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

    None where this thread is not profiled. The event begins when the operation is submitted, as with gloo, so it holds
    the time in the queue.
    """
    if not torch.autograd._profiler_enabled():
        return None
    ended: torch.futures.Future = torch.futures.Future()
    with torch.autograd.profiler.record_function(f"{NAME}:{name}") as event:
        event._call_end_callbacks_on_future(ended)
    return ended


@untraced
class Several(Work):
    """Several works as one. Their number may differ between ranks (of messages, say)."""

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

    - The order of submission is the order of the program, and the group is its topology's only user. So a rank
      announces no operation to other ranks.
    - An operation begins when all ranks have come to it. When they came to different ones, all ranks get a
      DisagreementError, and the group goes on. (Calls in the engine's queues would break the queue.)
    - An operation that exceeds its limit breaks the group: all waiting operations end in the same error.
    - An operation that is submitted in a callback of another one (a comm hook that chains collectives by
      `Future.then`, as PowerSGD's does) runs at once, so its position in the order does not depend on timing.

    name: of the group. threaded: False runs every operation at once, in the caller's thread; so does an MPI
        library without MPI_THREAD_MULTIPLE. Otherwise backward goes on in the caller's thread meanwhile.
    """

    def __init__(self, topology: Topology, name: str, threaded: bool = True) -> None:
        self.broken: Exception | None = None  # set when an operation has timed out or the group is destroyed
        self.submitted = 0
        self._detector, self._messages = topology.detector, topology.detector.messages
        self._record = topology.wait_record()
        self._record.raises = True
        self._comm = topology.private(wait=self._record)
        self._rendezvous: list[object] = []  # MPI may still write to it after this rank has given up
        self._threaded = threaded
        self._queue = self._open(topology, f"process group {name}")
        self._lock = threading.Lock()
        self._unfinished: dict[Work, None] = {}  # in the order of submission
        self._since = 0.0  # when the first of them became the first
        self._inside: int | None = None  # the thread that runs an operation
        if self._threaded:
            executor = weakref.ref(self)
            threading.Thread(target=_check_deadlines, args=(executor,), name="allreduce deadlines", daemon=True).start()

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
            future = self._queue.submit(partial(self._execute, work, action), ended=partial(self._ended, work))
        except Exception:  # the queue is closed
            self._ended(work, None)
            raise
        if not self._threaded:
            future.wait()
        return work

    def close(self, limit: float) -> bool:
        """End after all submitted operations. False when the other ranks do not end within `limit` seconds.

        Zero waits for nothing, and so does a group in which a caller's wait has timed out.
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
        self._queue.abandon()  # first: callbacks that are chained to the futures run here, and may wait for any of them
        for work in reversed(works):
            work.end(error)

    def check_deadline(self) -> None:
        """Fail when the first operation is over its time."""
        with self._lock:
            work = next(iter(self._unfinished), None)
            late = work is not None and time.monotonic() > self._since + work.limit
        if work is not None and late:
            self.fail(self._late(work))

    def _open(self, topology: Topology, name: str) -> Queue:
        worker = topology.once(Worker)
        if self._threaded:
            try:
                return worker.queue(name, threaded=True, alone=True)
            except UnavailableError:
                text = "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward"
                notices.once(topology.rank, text)
                self._threaded = False
        return worker.queue(name, alone=True)

    def _execute(self, work: Work, action: Callable[[], None]) -> None:
        """Run an operation, and the callbacks that are chained to its future."""
        outer, self._inside = self._inside, threading.get_ident()
        error: Exception | None = None
        try:
            with self._detector.hearing():
                self._meet(work)
                action()
        except Exception as raised:
            error = raised
            if ulfm.lost(raised) is not None:
                self.fail(raised)  # no operation can be done any more, also not the waiting ones
        work.end(error)
        self._inside = outer

    def _meet(self, work: Work) -> None:
        """Wait, mostly asleep, until all ranks have come to this operation, or until this one gives it up."""
        if self._comm.size == 1:
            return
        fingerprint = zlib.crc32(work.call.encode())
        sides = np.array([fingerprint, -fingerprint])  # the minimum of -x is minus the maximum
        request = self._comm.Iallreduce(MPI.IN_PLACE, sides, MPI.MIN)
        self._rendezvous = [request, sides]

        def over() -> bool:
            return request.Test() or self.broken is not None or self._record.error is not None

        self._record.begin(NamedCall(f"{work.call} of {self._queue.name}"))
        try:
            if not wait_until(over, work.limit):
                self.fail(self._late(work))
            if self._record.error is not None:  # a rank has left
                self.fail(self._record.error)
        finally:  # MPI raises when a rank was lost
            self._record.end()
        if self.broken is not None:
            raise self.broken
        if sides[0] != -sides[1]:
            raise disagreement(self._comm, all_values(self._comm, work.call, "learn what the ranks have called"))

    def _ended(self, work: Work, error: BaseException | None) -> None:
        """The queue has ended an operation, or has given it up."""
        if error is not None:
            given_up = error if isinstance(error, Exception) else RuntimeError(repr(error))
            work.end(self.broken or given_up)
        with self._lock:
            self._unfinished.pop(work, None)
            self._since = time.monotonic()

    def _late(self, work: Work) -> TimedOut:
        name = f"a callback on the future of {work.name}" if work.is_completed() else work.name
        text = (
            f"{name} was not done within {work.limit:g} s (the timeout of the group or of the call): another rank is "
            "late, hangs, or never called it. The group can't be used any more"
        )
        call = self._record.call
        return TimedOut(text if call is None else f"{text}\n{self._messages.table(call)}")


children.guard(Executor, "submit")


def _check_deadlines(reference: "weakref.ref[Executor]") -> None:
    """Check an executor's deadline as long as it lives. DDP waits for futures in C++, where a wait has no time-out.

    In a thread of its own: callbacks of operations that are over their time run here, and a callback may hang.
    """
    while True:
        time.sleep(DEADLINE_SECONDS)
        executor = reference()
        if executor is None or executor.broken is not None:
            return
        executor.check_deadline()
        del executor
