"""The operations of a process group: each is a Future that its caller waits for; the OperationQueue orders them.

Works and futures are of PyTorch's own classes, torch.distributed.Work and torch.futures.Future, so DDP's C++ reducer,
comm hooks and `dist.batch_isend_irecv` use them like any other backend's.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from allreduce import notices
from allreduce.call.announcements import PerRank
from allreduce.call.executor import Executor
from allreduce.call.queue import Future, Worker, without_frames
from allreduce.errors import RankLeftError, UnavailableError
from allreduce.process import children
from allreduce.topology import Topology
from allreduce.torch_backend.checks import NAME
from allreduce.transport import ulfm

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
class Operation(dist.Work, Future):
    """One operation of a group, from its submission to its end: PyTorch's Work, and a Future of the group's queue.

    name: for messages. result: the tensors that it writes. limit: seconds that it may take. group: the queue that runs
    it. work: as a Future's.
    """

    def __init__(
        self,
        name: str,
        result: Sequence[torch.Tensor],
        limit: float,
        group: "OperationQueue | None" = None,
        work: Callable[[PerRank], object] | None = None,
    ) -> None:
        dist.Work.__init__(self)
        Future.__init__(self, work, None if group is None else group.queue, name, name, limit=limit)
        self._group, self._result = group, list(result)
        self._future: torch.futures.Future | None = None
        self._chained: torch.futures.Future | None = None  # given to callers; ends after `_future`, in the same thread
        self._event = _begin_event(name)
        self._lock = threading.Lock()

    # What PyTorch calls

    def wait(self, timeout: timedelta | float | None = None) -> bool:  # type: ignore[override]
        """Wait for the end of the operation, and raise the error that it ended with.

        Raises DistBackendError after `timeout`; the operation continues. Without a timeout the queue ends the operation
        after its own limit.
        """
        limit = timeout_seconds(timeout, 0.0) or None
        try:
            if self.queue is None:  # a message, which is about to end
                self._done.wait()
            elif not self.done():
                self.queue.worker.wait_for(self._done, limit)
        except TimeoutError:
            if limit is None or self._group is None:  # raised by a signal handler of the program
                raise
            self._group.given_up.add(self)
            text = f"{self.name} was not done within {limit:g} s: another rank is late, or never called it"
            raise TimedOut(text) from None
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.done()

    def is_success(self) -> bool:
        return self.done() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

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
                if self.done():
                    self._set(self._future)
            assert self._chained is not None
            return self._chained

    # What the worker calls

    def run(self) -> None:
        """Do the work, then the callbacks that are chained to the future, in the calling thread."""
        group = self._group
        assert group is not None
        outer, group.inside = group.inside, threading.get_ident()
        try:
            Future.run(self)
        finally:
            group.inside = outer

    def finish(self, error: BaseException | None) -> None:
        """End the operation, once. Callbacks that were chained to the future run now, in the calling thread."""
        with self._lock:
            if self.done():
                return
            if self._event is not None:
                self._event.set_result(None)  # before a waiting thread can end the profile
            Future.finish(self, error)
            future = self._future
        if future is not None:
            self._set(future)

    def late(self) -> BaseException:
        assert self.queue is not None
        name = f"a callback on the future of {self.name}" if self.done() else self.name
        text = (
            f"{name} was not done within {self.limit:g} s (the timeout of the group or of the call): another rank "
            "is late, hangs, or never called it. The group can't be used any more"
        )
        call = self.queue.wait.call
        return TimedOut(text if call is None else f"{text}\n{self.queue.worker.detector.messages.table(call)}")

    def _set(self, future: torch.futures.Future) -> None:
        if self.error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self.error)


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

    def wait(self, timeout: timedelta | float | None = None) -> bool:  # type: ignore[override]
        """Wait for all members, and raise the first error."""
        for member in self._members:
            member.wait(timeout)
        self.finish(None)
        return True

    def is_completed(self) -> bool:
        return all(member.is_completed() for member in self._members)


class OperationQueue:
    """Runs the operations of a group in its topology's worker, in the order of submission. Creating it is collective.

    An operation starts once all ranks have reached it. If their operations differ, all raise DisagreementError, and the
    group stays usable. One that exceeds its limit breaks the group: all waiting ones end in the same error. One that is
    submitted in a callback of another (PowerSGD's comm hook) runs at once, so its place does not depend on timing.

    name: of the group. executor: of the backend that reduces its tensors; it compares the ranks' operations.
    threaded: False, or MPI without MPI_THREAD_MULTIPLE: every operation runs at once, in the caller's thread.
    """

    def __init__(self, topology: Topology, name: str, executor: Executor, threaded: bool = True) -> None:
        self.submitted = 0
        self.given_up: weakref.WeakSet[Operation] = weakref.WeakSet()  # a wait for these has timed out
        self._detector, self._executor = topology.detector, executor
        executor.sleeps = True  # backward needs the core
        self._threaded, self._compares = threaded, topology.size > 1
        self.inside: int | None = None  # the thread that runs an operation
        worker, name = topology.service(Worker), f"process group {name}"
        try:  # queue.broken: the error of all later operations
            self.queue = worker.queue(name, threaded=threaded, alone=True, wait=executor.wait)
        except UnavailableError:
            text = "this MPI has no MPI_THREAD_MULTIPLE, so communication does not overlap with backward"
            notices.once(topology.rank, text)
            self._threaded = False
            self.queue = worker.queue(name, alone=True, wait=executor.wait)

    def submit(
        self,
        name: str,
        written: Sequence[torch.Tensor],
        limit: float,
        action: Callable[[], object],
        signature: str | None = "",
        waits: bool = False,
    ) -> Operation:
        """Submit `action`, to run after all earlier operations, and return the operation. See Operation.

        signature: text after the name: the arguments that must be equal on all ranks. None: `action` is one call of the
        executor, which compares them. waits: the caller waits for it now.
        """
        if self.queue.broken is not None:
            raise without_frames(self.queue.broken)
        self.submitted += 1
        work = partial(self._do, None if signature is None else name + signature, action)
        operation = Operation(name, written, limit, self, work)
        if self.inside == threading.get_ident():
            operation.run()
            return operation
        self.queue.worker.submit(self.queue, operation, waits=waits or not self._threaded)
        return operation

    def close(self, limit: float) -> bool:
        """Finish all submitted operations on all ranks, then refuse further ones. Collective.

        Returns False if that takes longer than `limit` seconds. It does not wait, and returns False, if `limit` is 0 or
        a caller's wait has timed out.
        """
        waiting = limit > 0 and all(operation.done() for operation in self.given_up)
        try:
            if waiting:
                self.submit("destroy_process_group", [], limit, lambda: None).wait()
        except Exception:
            waiting = False
        self.fail(RuntimeError("this process group has been destroyed"))
        if waiting:
            self.queue.wait.final = None  # all ranks are here, and close the backends by this record
        return waiting

    def fail(self, error: BaseException) -> None:
        """Fail the running operation and all waiting ones with `error`, and refuse later ones. Local."""
        self.queue.worker.give_up(self.queue, error)

    def _do(self, call: str | None, action: Callable[[], object], _: PerRank) -> None:
        """Do an operation's action, once all ranks have reached this call, if it is given."""
        try:
            with self._detector.translating_failures():
                if self.queue.broken is not None:
                    raise without_frames(self.queue.broken)
                if self._compares and call is not None:
                    self._executor.compare(call, f" of {self.queue.name}")
                action()
        except Exception as error:
            if isinstance(error, RankLeftError) or ulfm.lost(error) is not None:
                self.fail(error)  # the waiting operations can't be done either
            raise


children.guard(OperationQueue, "submit")
