"""Waiting for messages. MPI's own waits poll, so a thread that waits beside one that computes sleeps instead."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from mpi4py import MPI

from allreduce.errors import AllReduceError

EAGER_SECONDS = 2e-5  # so long a wait does nothing but look
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 2e-4  # seconds; TCP's buffers keep a link busy for as long


class Pause:
    """What a thread does between two looks at what it waits for: nothing at first, then ever longer sleeps."""

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


def wait(request: MPI.Request) -> None:
    """Complete one request."""
    if _beside_another():
        asleep(request.Test)
    else:
        request.Wait()


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Complete all of them; see `all_done` for why one by one."""
    if _beside_another():
        asleep(lambda: all_done(requests))
    else:
        for request in requests:
            request.Wait()


def all_done(requests: Sequence[MPI.Request]) -> bool:
    """Whether all of them are complete. They are asked one by one, and not by MPI_Testall, MPI_Waitall and the like.

    When a rank is lost, Open MPI marks all of a call's requests as failed, also those that go on, and frees them when
    the call ends in an error; and one of these that is through then ends the program ("Send error after request
    freed").
    """
    return all(request.Test() for request in requests)


def asleep(done: Callable[[], bool], limit: float = math.inf) -> bool:
    """Call `done`, which lets MPI go on, until it is true, and mostly sleep in between.

    False when that is not so after `limit` seconds; zero looks once.
    """
    pause, deadline = Pause(), time.monotonic() + limit
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return False
        pause(now)
    return True


def _beside_another() -> bool:
    """True in a thread that was started to communicate while the main one computes."""
    return threading.get_ident() != threading.main_thread().ident


class Call(Protocol):
    """What a rank has called: its text for people, and a word that is alike on ranks that called the same."""

    @property
    def word(self) -> int: ...

    def __str__(self) -> str: ...


class Said(NamedTuple):
    """A call that is known by its text."""

    text: str
    word: int = 0

    def __str__(self) -> str:
        return self.text


class Wait:
    """A place where a thread of this rank waits for others: the calls of a backend, a lane, a communicator.

    number: alike on all ranks. call: under way now, None when there is none; count: of calls so far. Setting these
    two is all that a call costs. error: what the watch has found, to be raised by who waits.
    raises: whoever waits here looks at `error`; otherwise it is inside of MPI.
    """

    def __init__(self, number: int, raises: bool = False) -> None:
        self.number, self.raises = number, raises
        self.count = 0
        self.call: Call | None = None
        self.error: AllReduceError | None = None
        self._seen: tuple[int, Call | None] = (0, None)
        self.last: Call | None = None  # that was seen by a look, which most calls are not
        self.since = 0.0
        self.warned = False

    def begin(self, call: Call) -> None:
        """This rank comes to `call`."""
        self.count += 1
        self.error = None
        self.call = call

    def end(self) -> None:
        """It is done, or given up."""
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


LOOK_SECONDS = 0.25  # how often the waits are looked at
