"""The operations of a process group: each is an Operation that its caller waits for; the OperationQueue runs them.

Works and futures are of PyTorch's own classes, torch.distributed.Work and torch.futures.Future, so DDP's C++ reducer,
comm hooks and `dist.batch_isend_irecv` use them like any other backend's.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from allreduce import notices
from allreduce.call.executor import Executor
from allreduce.call.queue import Queue, Worker, without_frames
from allreduce.errors import RankLeftError, UnavailableError
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.torch_backend.checks import NAME
from allreduce.transport import ulfm
from allreduce.transport.wait import NamedCall

ClassT = TypeVar("ClassT", bound=type)

# Raised by work.wait() when an operation took too long; a RuntimeError, like all errors of torch.distributed.
TimedOut = dist.DistBackendError


def timeout_seconds(timeout: timedelta | float | None, default: float) -> float:
    """Convert a PyTorch timeout to seconds; None, 0 and negative (unset) values give `default`."""
    given = 0.0 if timeout is None else exact_seconds(timeout)
    return given if given > 0 else default


def exact_seconds(timeout: timedelta | float) -> float:
    """Convert a PyTorch timeout to seconds; 0 stays 0."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def not_compiled(kind: ClassT) -> ClassT:
    """Class decorator: Dynamo does not trace the methods; compiled code breaks its graph there."""
    for name, value in list(vars(kind).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("__"):
            setattr(kind, name, _hidden(value))
    return kind


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    hidden = torch._disable_dynamo(method)  # a call of `hidden` imports Dynamo, which takes seconds

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (hidden if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return call


@not_compiled
class Operation(dist.Work):
    """One operation of a group, from its submission to its end.

    name: the operation's name, for messages. result: the tensors that it writes. limit: seconds that it may take.
    signature: text after the name: the arguments that must be equal on all ranks.
    """

    def __init__(self, name: str, result: Sequence[torch.Tensor], limit: float, signature: str = "") -> None:
        super().__init__()
        self.name = name
        self.call = name + signature  # compared between ranks
        self.limit = limit
        self.given_up = False  # True: a wait for this operation has timed out
        self._result = list(result)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future | None = None
        self._chained: torch.futures.Future | None = None  # given to callers; ends after `_future`, in the same thread
        self._event = _begin_event(name)
        self._lock = threading.Lock()

    # What PyTorch calls

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end of the operation, and raise the error that it ended with.

        Raises DistBackendError after `timeout`; the operation continues. Without a timeout the executor ends the
        operation after its own limit.
        """
        limit = timeout_seconds(timeout, 0.0)
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

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation has written. Waits for it."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """Return a Future of the list of written tensors, or of a RuntimeError that names the operation's error."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=[*{each.device for each in self._result if each.is_cuda}])
                # C++ (DDP's reducer) would read an exception that is set on a future as a list of tensors, and crash.
                # It recognizes an error that a callback raises.
                self._chained = self._future.then(lambda future: future.value())
                if self._ended.is_set():
                    self._set(self._future)
            assert self._chained is not None
            return self._chained

    # What the executor calls

    def end(self, error: BaseException | None = None) -> None:
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
    """Begin an event of the profiler; it ends when the returned future gets a result, in any thread.

    Returns None if this thread is not profiled. The event begins when the operation is submitted, as with gloo, so it
    includes the time in the queue.
    """
    if not torch.autograd._profiler_enabled():
        return None
    ended: torch.futures.Future = torch.futures.Future()
    with torch.autograd.profiler.record_function(f"{NAME}:{name}") as event:
        event._call_end_callbacks_on_future(ended)
    return ended


@not_compiled
class CoalescedWork(Operation):
    """An Operation that waits for several others, its members. Their number may differ between ranks (messages)."""

    def __init__(self, name: str, members: Sequence[Operation], limit: float) -> None:
        super().__init__(name, [], limit)
        self._members = list(members)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all members, and raise the first error."""
        for member in self._members:
            member.wait(timeout)
        self.end()
        return True

    def is_completed(self) -> bool:
        return all(member.is_completed() for member in self._members)


class OperationQueue:
    """Runs the operations of a group in its topology's worker, in the order of submission. Creating it is collective.

    - The order of submission is the order of the program, and the group is its topology's only user. So a rank
      announces no operation to other ranks.
    - An operation starts once all ranks have reached it. If the ranks' operations differ, all ranks raise
      DisagreementError, and the group stays usable.
    - An operation that exceeds its limit breaks the group: all waiting operations end in the same error.
    - An operation that is submitted in a callback of another one (a comm hook that chains collectives by
      `Future.then`, as PowerSGD's does) runs at once, so its position in the order does not depend on timing.

    name: of the group. threaded: False runs every operation at once, in the caller's thread; so does an MPI
        library without MPI_THREAD_MULTIPLE. Otherwise operations overlap with backward.
    """

    def __init__(self, topology: Topology, name: str, threaded: bool = True) -> None:
        self.submitted = 0
        self._detector = topology.detector
        self._threaded = threaded
        self._queue = self._open(topology, f"process group {name}")
        self._record = self._queue.wait
        self._executor = Executor(topology, None, True, self._record, sleeps=True)  # its calls are the operations
        self._compares = topology.size > 1
        self._unfinished: set[Operation] = set()
        self._inside: int | None = None  # the thread that runs an operation

    @property
    def broken(self) -> BaseException | None:
        """The error of all later operations: one has timed out, a rank has failed, or the group was destroyed."""
        return self._queue.broken

    def submit(self, work: Operation, action: Callable[[], None]) -> Operation:
        """Submit `action`, to run after all earlier operations; `work` ends when it has run."""
        if self.broken is not None:
            raise without_frames(self.broken)
        self.submitted += 1
        if self._inside == threading.get_ident():
            self._execute(work, action)
            return work
        self._unfinished.add(work)
        run, ended, late = partial(self._execute, work, action), partial(self._ended, work), partial(self._late, work)
        future = self._queue.submit(run, work.name, ended=ended, limit=work.limit, late=late)
        if not self._threaded:
            future.wait()
        return work

    def close(self, limit: float) -> bool:
        """Finish all submitted operations on all ranks, then refuse further ones. Collective.

        Returns False if that takes longer than `limit` seconds. It does not wait, and returns False, if `limit` is 0 or
        a caller's wait has timed out.
        """
        waiting = limit > 0 and not any(work.given_up for work in self._unfinished)
        try:
            if waiting:
                self.submit(Operation("destroy_process_group", [], limit), lambda: None).wait()
        except Exception:
            waiting = False
        self.fail(RuntimeError("this process group has been destroyed"))
        return waiting

    def fail(self, error: BaseException) -> None:
        """Fail the running operation and all waiting ones with `error`, and refuse later ones. Local."""
        self._queue.worker.give_up(self._queue, error)

    def _open(self, topology: Topology, name: str) -> Queue:
        worker = topology.service(Worker)
        if self._threaded:
            try:
                return worker.queue(name, threaded=True, alone=True)
            except UnavailableError:
                text = "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward"
                notices.once(topology.rank, text)
                self._threaded = False
        return worker.queue(name, alone=True)

    def _execute(self, work: Operation, action: Callable[[], None]) -> None:
        """Run an operation, and the callbacks that are chained to its future."""
        outer, self._inside = self._inside, threading.get_ident()
        error: BaseException | None = None
        try:
            with self._detector.translating_failures():
                self._compare(work)
                action()
        except Exception as raised:
            error = raised
            if isinstance(raised, RankLeftError) or ulfm.lost(raised) is not None:
                self.fail(raised)  # the waiting operations can't be done either
        work.end(error)
        self._inside = outer

    def _compare(self, work: Operation) -> None:
        """Wait, mostly asleep, until all ranks have reached this operation. Raises DisagreementError if they differ."""
        if not self._compares:
            return
        self._record.begin(NamedCall(f"{work.call} of {self._queue.name}"))
        try:
            if self.broken is not None:
                raise without_frames(self.broken)
            self._executor.compare(work.call)
        finally:
            self._record.end()

    def _ended(self, work: Operation, error: BaseException | None) -> None:
        """Called by the queue when an operation has ended or was cancelled."""
        self._unfinished.discard(work)
        work.end(error)

    def _late(self, work: Operation) -> TimedOut:
        name = f"a callback on the future of {work.name}" if work.is_completed() else work.name
        text = (
            f"{name} was not done within {work.limit:g} s (the timeout of the group or of the call): another rank is "
            "late, hangs, or never called it. The group can't be used any more"
        )
        call = self._record.call
        return TimedOut(text if call is None else f"{text}\n{self._detector.messages.table(call)}")


children.guard(OperationQueue, "submit")
