"""Waiting for other ranks: the one loop that waits, the record of each wait, and the watcher of these records.

MPI's blocking waits poll and occupy a core, so `wait_until` alternates polls and sleeps. Every wait on a communicator
has a `WaitRecord`, which the communicator's `Watcher` checks, so it ends in a result or a named error. Blocking MPI
calls are made inside `waiting`. Backends' calls have records too. No other module loops on an MPI request.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from allreduce.errors import CollectiveTimeoutError
from allreduce.transport.deferred_free import free_later

EAGER_SECONDS = 2e-5  # how long a wait polls before its first sleep
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 2e-4  # no longer than TCP's buffers keep a link busy
SMALL = 1e-3, 1e-3  # (eager, longest sleep) of waits for small messages, which are mostly short
CHECK_SECONDS = 0.25  # interval at which a watcher checks the waits


# The record of a wait


class DescribedCall(Protocol):
    """A call: its text for messages, and a fingerprint that is equal on ranks that make the same call."""

    @property
    def fingerprint(self) -> int: ...

    def __str__(self) -> str: ...


class NamedCall(NamedTuple):
    """A call that is described by a text."""

    text: str
    fingerprint: int = 0

    def __str__(self) -> str:
        return self.text


class WaitRecord:
    """Records the call in which one user (a backend, a queue, a communicator) waits for other ranks.

    number: the user's number, equal on all ranks. call: the running call, or None. count: how many calls the user has
        made. begun: when the last one began, by time.perf_counter(). A call sets the three and clears `error`. error:
        set by the watcher, for the user to raise. It ends the wait: the watcher judges the call no more until it waits
        again. raises: True if the user checks `error` while it waits; False if it waits inside MPI. final: the error of
        all further waits. ranks: names the topology's ranks, for dumps.
    """

    def __init__(self, number: int, raises: bool = False, ranks: str = "") -> None:
        self.number, self.raises = number, raises
        self.user = f"{ranks}/{number}"  # unique in the job
        self.count, self.begun = 0, 0.0
        self.call: DescribedCall | None = None
        self.error: BaseException | None = None
        self.final: BaseException | None = None  # unlike `error`, it is not cleared by `begin`
        self.interrupted = False  # a wait has ended in an error, so MPI may still use its communicator
        self._seen = -1  # the number of the call in the last check
        self.since = 0.0
        self.warned = False

    def begin(self, call: DescribedCall) -> None:
        """Record that this rank has reached `call`."""
        self.count += 1
        self.begun = time.perf_counter()
        self.call = call
        self.error = None  # after `call`: the watcher takes back an error of another call

    def end(self) -> None:
        """Record that the call has ended."""
        self.call = None

    @property
    def unfinished(self) -> bool:
        """Whether a wait goes on, or has ended in an error."""
        return self.interrupted or not (self.call is None and self.error is None and self.final is None)

    def __str__(self) -> str:
        return f"{self.call} (call number {self.count})"

    def new(self, now: float) -> bool:
        """Return True if the call is not the one of the last check."""
        if self.call is not None and self._seen == self.count:
            return False
        self._seen = -1 if self.call is None else self.count  # not the call, which holds its backend
        self.since, self.warned = now, False
        if self.call is not None:
            self.error = None  # of an earlier call
        return True


# The watcher of records


class Watcher(Protocol):
    """Checks the waits on communicators, and ends those that would last for ever: health's stall detector.

    wait_record: creates a record, which is checked until `forget`. __exit__: raises RankLostError if a failed rank
    caused `error`. check: raises RankLostError if a rank has failed; cheap. check_waits: checks all records; raises
    `wait.final` or `wait.error`.
    """

    def wait_record(self, number: int, raises: bool = False) -> WaitRecord: ...

    def forget(self, wait: WaitRecord) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def check(self) -> None: ...

    def check_waits(self, wait: WaitRecord | None = None) -> None: ...


default: list[Callable[[], Watcher]] = []  # creates the watcher of communicators without one


@functools.cache
def _watched() -> int:
    """Return the key of communicators' attribute (watcher, record). Created late: child processes do not start MPI."""
    return MPI.Comm.Create_keyval()


def watched(comm: MPI.Comm, watcher: Watcher, wait: WaitRecord) -> None:
    """Make waits on `comm` use this record of `watcher`. Local."""
    comm.Set_attr(_watched(), (watcher, wait))


def record_of(comm: MPI.Comm) -> WaitRecord | None:
    """Return the record of waits on a communicator, if it is watched. Local."""
    pair: Any = comm.Get_attr(_watched())
    return pair[1] if pair else None


# Waits on a communicator


def wait_for(comm: MPI.Comm, request: MPI.Request, what: str, limit: float = math.inf) -> None:
    """Wait for a control message; the watcher reports a long wait.

    what: text for reports. limit: seconds until CollectiveTimeoutError; the topology's timeout applies too. Raises
        CollectiveTimeoutError, RankLeftError or DisagreementError on this rank if the other ranks do not take part.
    """
    with _Recorded(comm, what, raises=True) as (watcher, wait):
        try:
            if not (request.Test() or wait_until(request.Test, limit, checking(watcher, wait), Pause(*SMALL))):
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks in: {what}")
        except BaseException:
            free_later(request)  # and its buffer, into which MPI may still write
            raise


def waiting(comm: MPI.Comm, what: str, raises: bool = False) -> AbstractContextManager[object]:
    """Context manager for a blocking MPI call on `comm`, which no loop of ours can end. Local.

    If other ranks do not come, the watcher reports which ranks are missing in `what`, and ends the job after the
    timeout. raises: the body is a loop that ends by itself; the watcher only reports.
    """
    return _Recorded(comm, what, raises)


class _Recorded:
    """Context manager: record that this rank waits on a communicator, in `what` unless a backend's call is running.

    A class, because one with `contextmanager` costs a microsecond more, as much as a small message.
    """

    def __init__(self, comm: MPI.Comm, what: str, raises: bool) -> None:
        self._comm, self._what, self._raises = comm, what, raises

    def __enter__(self) -> tuple[Watcher, WaitRecord]:
        pair: Any = self._comm.Get_attr(_watched())
        self._watched = pair is not None
        if pair is None:
            watcher = default[0]()
            pair = watcher, watcher.wait_record(0)
        self._watcher, self._wait = _, wait = pair
        self._begins = wait.call is None
        if self._begins:
            wait.begin(NamedCall(self._what))
        wait.error = None  # of an earlier wait in this call
        self._inside, wait.raises = wait.raises, self._raises
        return pair

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        wait = self._wait
        wait.interrupted |= error is not None
        try:
            self._watcher.__exit__(kind, error, trace)
        finally:
            wait.raises = self._inside
            if self._begins:
                wait.end()
            if not self._watched:
                self._watcher.forget(wait)


def checking(watcher: Watcher, wait: WaitRecord) -> Callable[[], None]:
    """Return a function for `wait_until` that has the watcher check this wait at intervals, and raises its error."""
    checked = time.monotonic()

    def check() -> None:
        nonlocal checked
        watcher.check()
        now = time.monotonic()
        if now - checked > CHECK_SECONDS:
            checked = now
            watcher.check_waits(wait)

    return check


# The loop


class Pause:
    """The pause between two polls: none at first, then sleeps of growing length."""

    def __init__(self, eager: float = EAGER_SECONDS, longest: float = LONGEST_SLEEP) -> None:
        self._eager, self._longest = eager, longest
        self.begin()

    def begin(self) -> None:
        """Start again without sleeping, for a new wait."""
        self._until, self._sleep = time.monotonic() + self._eager, SHORTEST_SLEEP

    def __call__(self, now: float) -> None:
        """Sleep, unless the wait has just begun. now: from time.monotonic()."""
        if now > self._until:
            time.sleep(self._sleep)
            self._sleep = min(2 * self._sleep, self._longest)


def wait_until(
    done: Callable[[], bool],
    limit: float = math.inf,
    meanwhile: Callable[[], object] | None = None,
    pause: Callable[[float], object] | None = None,
) -> bool:
    """Poll `done()`, in which MPI makes progress, until it returns True; sleep between polls. Local.

    Returns False after `limit` seconds; 0 polls once. meanwhile: called between two polls; an error that it raises ends
    the wait. pause: called after `meanwhile`, with time.monotonic().
    """
    pause, deadline = pause or Pause(), time.monotonic() + limit
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        if meanwhile is not None:
            meanwhile()
        pause(now)
    return True


def wait(*requests: MPI.Request) -> None:
    """Wait for all requests, one by one (see `all_done`). Threads other than the main one sleep between polls."""
    if threading.get_ident() != threading.main_thread().ident:
        wait_until(lambda: all_done(requests))
    else:
        for request in requests:
            request.Wait()


def all_done(requests: Sequence[MPI.Request]) -> bool:
    """Return whether all requests are complete. They are tested one by one, not by MPI_Testall or MPI_Waitall.

    When a rank has failed, Open MPI marks all requests of such a call as failed, also those that continue, and frees
    them when the call raises an error. A request that completes later then ends the program ("Send error after request
    freed").
    """
    return all(request.Test() for request in requests)
