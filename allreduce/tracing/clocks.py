"""Clocks of different ranks, compared by exchanged timestamps.

Rank 0 asks another rank for its time, again and again. The answer with the shortest round trip says most: that
clock showed it half a round trip ago, to within the other half. (F. Cristian: Probabilistic clock synchronization,
1989; NTP does the same.) Clocks also drift, so they are compared at the beginning and at the end, and what lies
between is interpolated.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.transport.wait import waiting

ROUNDS, WHAT = 12, "compare clocks"
now = time.perf_counter_ns


class Comparison(NamedTuple):
    """Of one rank's clock with rank 0's, in nanoseconds.

    here: rank 0's time. ahead: how much more the other clock shows. error: by which `ahead` may be wrong.
    """

    here: int
    ahead: int
    error: int


def compare(comm: MPI.Intracomm, clock: Callable[[], int] | None = None) -> list[Comparison]:
    """The comparison of every rank's clock, on rank 0; an empty list on the others. Collective.

    clock: what shows nanoseconds, such as time.time_ns; `now` when none is given.
    """
    clock = clock or now
    if comm.rank == 0:
        return [Comparison(clock(), 0, 0), *(_ask(comm, rank, clock) for rank in range(1, comm.size))]
    stamp = np.empty(1, np.int64)
    with waiting(comm, WHAT):
        for _ in range(ROUNDS):
            comm.Recv(stamp, 0)
            stamp[0] = clock()
            comm.Send(stamp, 0)
    return []


def _ask(comm: MPI.Intracomm, rank: int, clock: Callable[[], int]) -> Comparison:
    best, stamp = None, np.empty(1, np.int64)
    with waiting(comm, WHAT):
        for _ in range(ROUNDS):
            asked = clock()
            comm.Send(stamp, rank)
            comm.Recv(stamp, rank)
            answered = clock()
            heard = comparison(asked, int(stamp[0]), answered)
            if best is None or heard.error < best.error:
                best = heard
    assert best is not None
    return best


def comparison(asked: int, shown: int, answered: int) -> Comparison:
    """Of a clock that showed `shown` at some time between two of this one.

    A difference below its own error is none: ranks of one machine have one clock.
    """
    middle, error = (asked + answered) // 2, (answered - asked + 1) // 2
    ahead = shown - middle
    return Comparison(middle, ahead if abs(ahead) > error else 0, error)


def aligned(times: np.ndarray, first: Comparison, last: Comparison) -> np.ndarray:
    """Times of another rank's clock as rank 0's clock showed them. (n,) int64 -> (n,) int64"""
    shown = np.array([first.here + first.ahead, last.here + last.ahead])
    if shown[1] <= shown[0]:
        return times - first.ahead
    share = (times - shown[0]) / (shown[1] - shown[0])
    return times - first.ahead - np.rint(share * (last.ahead - first.ahead)).astype(np.int64)
