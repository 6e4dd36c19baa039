"""Waiting for messages. MPI's own waits poll, so a thread that waits beside one that computes sleeps instead."""

import math
import threading
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

LOOKS = 20  # how often to look before sleeping
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 2e-4  # seconds; TCP's buffers keep a link busy for as long


def wait(request: MPI.Request) -> None:
    """Complete one request."""
    if _beside_another():
        asleep(request.Test)
    else:
        request.Wait()


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Complete all of them."""
    if _beside_another():
        asleep(lambda: MPI.Request.Testall(requests))
    else:
        MPI.Request.Waitall(requests)


def asleep(done: Callable[[], bool], limit: float = math.inf) -> bool:
    """Call `done`, which lets MPI go on, until it is true, and mostly sleep in between.

    False when that is not so after `limit` seconds; zero looks once.
    """
    looks, pause, deadline = 0, SHORTEST_SLEEP, time.monotonic() + limit
    while not done():
        looks += 1
        if time.monotonic() >= deadline:
            return False
        if looks > LOOKS:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
    return True


def _beside_another() -> bool:
    """True in a thread that was started to communicate while the main one computes."""
    return threading.get_ident() != threading.main_thread().ident
