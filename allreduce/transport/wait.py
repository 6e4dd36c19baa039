"""Waiting for other ranks: the one loop that waits, the record of each wait, and the watcher of these records.

MPI's own waits poll, so a thread that waits beside one that computes looks and sleeps in turn (`wait_until`). A wait on
a communicator has a `WaitRecord`, at which the communicator's `Watcher` looks, so it ends in a result or in a named
error. Calls of MPI that wait stand inside of `waiting`. Outside of `allreduce.transport`, and of backends, whose calls
have records, there is no other wait.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from allreduce.errors import AllReduceError, CollectiveTimeoutError
from allreduce.transport.deferred_free import free_later

EAGER_SECONDS = 2e-5  # a wait looks for so long before it sleeps
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 2e-4  # seconds; TCP's buffers keep a link busy for as long
SMALL = 1e-3, 1e-3  # the same, of waits for small messages, which are seldom long
LOOK_SECONDS = 0.25  # how often a watcher looks at the waits


# The record of a wait


class Call(Protocol):
    """A call: its text for people, and a fingerprint that is equal on ranks that make the same call."""

    @property
    def fingerprint(self) -> int: ...

    def __str__(self) -> str: ...


class NamedCall(NamedTuple):
    """A call that is known by its text."""

    text: str
    fingerprint: int = 0

    def __str__(self) -> str:
        return self.text


class WaitRecord:
    """The waits of one user (a backend, a queue, a communicator) for other ranks, one call at a time.

    number: of the user, the same on all ranks. call: the one under way, or None. count: of the user's calls so far.
    Setting `call` and `count` is all that a call costs. error: found by the watcher, for the user to raise.
    raises: the user looks at `error` while it waits; otherwise it is inside of MPI.
    """

    def __init__(self, number: int, raises: bool = False) -> None:
        self.number, self.raises = number, raises
        self.count = 0
        self.call: Call | None = None
        self.error: AllReduceError | None = None
        self._seen: tuple[int, Call | None] = (0, None)
        self.last: Call | None = None  # that a look of the watcher has met; most calls are over before
        self.since = 0.0
        self.warned = False

    def begin(self, call: Call) -> None:
        """This rank comes to `call`."""
        self.count += 1
        self.error = None
        self.call = call

    def end(self) -> None:
        """The call is done, or given up."""
        self.call = None

    def __str__(self) -> str:
        return f"{self.call}, call {self.count} there"

    def new(self, now: float) -> bool:
        """True when this is another call than at the last look."""
        if self._seen == (self.count, self.call) and self.call is not None:
            return False
        self._seen = (self.count, self.call)
        self.last = self.call or self.last
        self.since, self.warned = now, False
        return True


# The watcher of records


class Watcher(Protocol):
    """Looks at the waits on communicators, and ends those that would last for ever: health's stall detector.

    wait_record: a new record, looked at until `forget`. hearing: inside, MPI's error about a failed rank becomes a
    RankLostError. check: raises it when a rank has failed, at no cost. look: at all records; raises `wait`'s error.
    """

    def wait_record(self, number: int, raises: bool = False) -> WaitRecord: ...

    def forget(self, wait: WaitRecord) -> None: ...

    def hearing(self) -> AbstractContextManager[None]: ...

    def check(self) -> None: ...

    def look(self, wait: WaitRecord | None = None) -> None: ...


default: list[Callable[[], Watcher]] = []  # makes the watcher of communicators that `watched` was not called for


@functools.cache
def _watched() -> int:
    """The key of what is tied to a communicator; made at its first use, because MPI does not run in child processes."""
    return MPI.Comm.Create_keyval()


def watched(comm: MPI.Comm, watcher: Watcher, wait: WaitRecord) -> None:
    """From now on waits on `comm` use this record of `watcher`."""
    comm.Set_attr(_watched(), (watcher, wait))


def record_of(comm: MPI.Comm) -> WaitRecord | None:
    """The record of waits on a communicator, if it is watched."""
    pair: Any = comm.Get_attr(_watched())
    return pair[1] if pair else None


# Waits on a communicator


def wait_for(comm: MPI.Comm, request: MPI.Request, what: str, limit: float = math.inf) -> None:
    """Wait for a control message; the watcher reports it when it takes long.

    limit: seconds after which the wait is given up; never longer than the topology's timeout.
    Raises CollectiveTimeoutError, RankLeftError or DisagreementError on this rank when the others don't come.
    """
    with _recorded(comm, what, raises=True) as (watcher, wait):
        try:
            if not (request.Test() or wait_until(request.Test, limit, looking(watcher, wait), Pause(*SMALL))):
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks in: {what}")
        except BaseException:
            free_later(request)  # and its buffer, into which MPI may still write
            raise


@contextmanager
def waiting(comm: MPI.Comm, what: str) -> Iterator[None]:
    """For a call of MPI that waits for the other ranks of `comm` and that no loop of ours can end. Local.

    When they don't come, the watcher reports which ranks are missing in `what`, and ends the job.
    """
    with _recorded(comm, what, raises=False):
        yield


@contextmanager
def _recorded(comm: MPI.Comm, what: str, raises: bool) -> Iterator[tuple[Watcher, WaitRecord]]:
    """Record that this rank waits on a communicator, in `what` unless a backend's call is under way."""
    pair: Any = comm.Get_attr(_watched())
    if pair:
        watcher, wait = pair
    else:
        watcher = default[0]()
        wait = watcher.wait_record(0)
    begins = wait.call is None
    if begins:
        wait.begin(NamedCall(what))
    inside, wait.raises = wait.raises, raises
    try:
        with watcher.hearing():
            yield watcher, wait
    finally:
        wait.raises = inside
        if begins:
            wait.end()
        if pair is None:
            watcher.forget(wait)


def looking(watcher: Watcher, wait: WaitRecord) -> Callable[[], None]:
    """For `wait_until`: has the watcher look at this wait now and then, and raises the error that it finds."""
    looked = time.monotonic()

    def look() -> None:
        nonlocal looked
        watcher.check()
        now = time.monotonic()
        if now - looked > LOOK_SECONDS:
            looked = now
            watcher.look(wait)

    return look


# The loop


class Pause:
    """The pause of a thread between two looks: none at first, then sleeps of growing length."""

    def __init__(self, eager: float = EAGER_SECONDS, longest: float = LONGEST_SLEEP) -> None:
        self._eager, self._longest = eager, longest
        self.begin()

    def begin(self) -> None:
        """A wait begins."""
        self._until, self._sleep = time.monotonic() + self._eager, SHORTEST_SLEEP

    def __call__(self, now: float) -> None:
        """now: by time.monotonic()."""
        if now > self._until:
            time.sleep(self._sleep)
            self._sleep = min(2 * self._sleep, self._longest)


def wait_until(
    done: Callable[[], bool],
    limit: float = math.inf,
    meanwhile: Callable[[], object] | None = None,
    pause: Callable[[float], object] | None = None,
) -> bool:
    """Call `done`, in which MPI makes progress, until it is true, and mostly sleep in between.

    False when it is not true after `limit` seconds; zero looks once. meanwhile: called between two looks; an error that
    it raises ends the wait. pause: called with the time, by time.monotonic(), after that.
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
    """Complete all requests, one by one (see `all_done`). A thread beside the main one sleeps meanwhile."""
    if threading.get_ident() != threading.main_thread().ident:
        wait_until(lambda: all_done(requests))
    else:
        for request in requests:
            request.Wait()


def all_done(requests: Sequence[MPI.Request]) -> bool:
    """Whether all requests are complete. They are tested one by one, not by MPI_Testall or MPI_Waitall.

    When a rank is lost, Open MPI marks all requests of such a call as failed, also those that go on, and frees them
    when the call ends in an error. A request that completes later then ends the program ("Send error after request
    freed").
    """
    return all(request.Test() for request in requests)
