"""meet: a barrier for ranks that come at very different times; patient: waits of which no stall is reported."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from allreduce.errors import CollectiveTimeoutError
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import CHECK_SECONDS, Pause, wait_until

LONGEST_SLEEP = 0.02  # seconds between two polls: other ranks need the cores


def meet(
    topology: Topology,
    what: str,
    limit: float = math.inf,
    patience: float = math.inf,
    impatient: Callable[[], object] = bool,
) -> None:
    """Return when all ranks of a topology have made this call. Collective.

    Unlike other waits it is not reported as a stall, and the topology's timeout does not end it, because ranks may come
    much later: they train. what: named in errors. limit: seconds until CollectiveTimeoutError. impatient: called after
    `patience` seconds. Raises RankLeftError if a rank has left, and RankLostError if one was lost.
    """
    detector, begin = topology.detector, time.monotonic()
    checked = begin

    def check() -> None:
        nonlocal checked
        detector.check()
        if (now := time.monotonic()) - checked < CHECK_SECONDS:
            return
        checked = now
        detector.check_waits()
        detector.messages.check_present(range(topology.size), CHECK_SECONDS, what)

    with detector.translating_failures():
        request = topology.world.Ibarrier()
        pause = Pause(longest=LONGEST_SLEEP)
        try:
            if wait_until(request.Test, min(patience, limit), check, pause):
                return
            impatient()
            if not wait_until(request.Test, limit - (time.monotonic() - begin), check, pause):
                raise CollectiveTimeoutError(f"waited {limit:.0f} s for other ranks in: {what}")
        except BaseException:
            free_later(request)
            raise


@contextmanager
def patient(topology: Topology) -> Iterator[None]:
    """Context manager: this rank's waits for the others are neither reported nor ended by a time-out, because the ranks
    of other parts may train for long."""
    detector = topology.detector
    before = detector.stall, detector.timeout
    detector.stall = detector.timeout = float("inf")
    try:
        yield
    finally:
        detector.stall, detector.timeout = before
