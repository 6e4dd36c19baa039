"""Waiting for messages. MPI's own waits poll, so a thread that waits beside one that computes sleeps instead."""

import math
import threading
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

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
