"""Measures pairs of ranks: how long a small message takes, and how fast a large one is."""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.doctor.pairs import Measured, Pair
from allreduce.transport.control import all_values, combine

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
TURNS = 20  # of the small message
USUAL = 0.25  # the quantile of their times that counts: some turns wait for a core that something else has
ANSWER_SECONDS = 15.0  # a rank that takes longer is not reached
LARGE_SECONDS, LARGE_TURNS = 0.03, 4  # so long, and so often at most, for the large message

_unanswered: list[object] = []  # MPI may still write to what was given to it


class SilentError(Exception):
    """A rank does not answer another one."""


class Results(NamedTuple):
    """What the pairs were found to be; the same on all ranks."""

    measured: list[Measured]
    unreachable: list[Pair]


def measure(
    comm: MPI.Intracomm, rounds: Sequence[Sequence[Pair]], seconds: float, tell: Callable[[int, int], None]
) -> Results:
    """Measure pairs of `comm`, round by round, until the time is over. Collective.

    tell: called after each round with its number and how many there are.
    """
    deadline = time.monotonic() + seconds
    large = np.ones(LARGE_BYTES, np.uint8)
    found: list[tuple[int, int, float, float]] = []
    silent: list[Pair] = []
    for number, pairs in enumerate(rounds):
        going = np.array([time.monotonic() < deadline and not silent], np.int64)
        if not combine(comm, going, "measure pairs of ranks", MPI.MIN)[0]:
            break
        for first, second in pairs:
            try:
                if comm.rank == second:
                    _answer(comm, first, large)
                elif comm.rank == first:
                    found.append((first, second, *_ask(comm, second, large)))
            except SilentError:
                silent.append((first, second))
        tell(number + 1, len(rounds))
    heard = all_values(comm, [found, silent], "gather what pairs of ranks have measured")
    measured = sorted(Measured(*pair) for mine, _ in heard for pair in mine)
    return Results(measured, sorted({(one, other) for _, mine in heard for one, other in mine}))


def _ask(comm: MPI.Intracomm, other: int, large: np.ndarray) -> tuple[float, float]:
    """Latency and bandwidth to a rank that is in `_answer`."""
    small = np.zeros(SMALL_BYTES, np.uint8)
    _turn(comm, other, small)  # the first contact of two ranks makes their connection
    latency = float(np.quantile([_turn(comm, other, small) for _ in range(TURNS)], USUAL)) / 2
    once = _turn(comm, other, large)
    more = int(min(LARGE_TURNS, max(1, LARGE_SECONDS / once)))
    _complete(comm.Isend(np.array([more]), other))
    best = min(_turn(comm, other, large) for _ in range(more))
    return latency, 2 * LARGE_BYTES / min(best, once)


def _turn(comm: MPI.Intracomm, other: int, message: np.ndarray) -> float:
    """Seconds of a message there and back."""
    begin = time.perf_counter()
    _complete(comm.Isend(message, other))
    _complete(comm.Irecv(message, other))
    return time.perf_counter() - begin


def _answer(comm: MPI.Intracomm, other: int, large: np.ndarray) -> None:
    small, more = np.zeros(SMALL_BYTES, np.uint8), np.ones(1, np.int64)
    for message in [small] * (1 + TURNS) + [large]:
        _return(comm, other, message)
    _complete(comm.Irecv(more, other))
    for _ in range(int(more[0])):
        _return(comm, other, large)


def _return(comm: MPI.Intracomm, other: int, message: np.ndarray) -> None:
    _complete(comm.Irecv(message, other))
    _complete(comm.Isend(message, other))


def _complete(request: MPI.Request) -> None:
    """Wait for one message without sleeping, which would be measured too. Raises SilentError when it does not come."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not request.Test():
        os.sched_yield()
        if time.monotonic() > deadline:
            _unanswered.append(request)
            raise SilentError
