"""Clocks of different ranks, compared by exchanged timestamps.

The ranks form a binomial tree. Each asks its children for their time, ROUNDS times. The answer with the shortest round
trip counts: the other clock showed that time half a round trip ago, with an error of at most half a round trip. (F.
Cristian: Probabilistic clock synchronization, 1989; NTP does the same.) Offsets and errors are added along the tree.
Clocks drift, so they are compared at the start and at the end; times between are interpolated.
"""

import time
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import binomial, subtree
from allreduce.transport.wait import waiting

ROUNDS, WHAT = 12, "compare clocks"
now = time.perf_counter_ns


class ClockOffset(NamedTuple):
    """The offset of one rank's clock from rank 0's, in nanoseconds.

    here: rank 0's time at the comparison. ahead: the other clock minus rank 0's. error: bound on the error of `ahead`.
    """

    here: int
    ahead: int
    error: int


def compare(comm: MPI.Intracomm) -> list[ClockOffset]:
    """Measure every rank's clock offset. Collective. Returns the offsets by rank on rank 0, [] on other ranks."""
    parent, children = binomial(comm.rank, 0, comm.size)
    if parent is not None:
        _answer(comm, parent)
    direct = [_ask(comm, child) for child in children]
    found = np.empty((len(subtree(comm.rank, comm.size)), 3), np.int64)  # of this rank and its descendants
    found[0] = now(), 0, 0
    with waiting(comm, WHAT):
        for child, offset in zip(children, direct, strict=True):
            place = child - comm.rank
            below = found[place : place + len(subtree(child, comm.size))]
            comm.Recv(below, child)
            below[0] = offset.here + offset.ahead, 0, 0
            below += (-offset.ahead, offset.ahead, offset.error)  # from the child's clock to this one
        if parent is not None:
            comm.Send(found, parent)
            return []
    return [ClockOffset(*row) for row in found.tolist()]


def _answer(comm: MPI.Intracomm, parent: int) -> None:
    stamp = np.empty(1, np.int64)
    with waiting(comm, WHAT):
        for _ in range(ROUNDS):
            comm.Recv(stamp, parent)
            stamp[0] = now()
            comm.Send(stamp, parent)


def _ask(comm: MPI.Intracomm, child: int) -> ClockOffset:
    """Return the offset of a child's clock from this rank's."""
    best, stamp = None, np.empty(1, np.int64)
    with waiting(comm, WHAT):
        for _ in range(ROUNDS):
            asked = now()
            comm.Send(stamp, child)
            comm.Recv(stamp, child)
            answered = now()
            offset = clock_offset(asked, int(stamp[0]), answered)
            if best is None or offset.error < best.error:
                best = offset
    assert best is not None
    return best


def clock_offset(asked: int, shown: int, answered: int) -> ClockOffset:
    """Return the offset of a clock that showed `shown` between `asked` and `answered` of this clock.

    An offset below its error counts as 0: ranks of one machine share a clock.
    """
    middle, error = (asked + answered) // 2, (answered - asked + 1) // 2
    ahead = shown - middle
    return ClockOffset(middle, ahead if abs(ahead) > error else 0, error)


def aligned(times: np.ndarray, first: ClockOffset, last: ClockOffset) -> np.ndarray:
    """Convert times of another rank's clock to rank 0's, between two comparisons. (n,) int64 -> (n,) int64"""
    shown = np.array([first.here + first.ahead, last.here + last.ahead])
    if shown[1] <= shown[0]:
        return times - first.ahead
    share = (times - shown[0]) / (shown[1] - shown[0])
    return times - first.ahead - np.rint(share * (last.ahead - first.ahead)).astype(np.int64)
