"""Honest timing, the same for every benchmark here.

All cells (a contender and an array) take turns: A B C A B C ..., so a machine that drifts hits all of them.
With small arrays a turn is a burst of up to 10 iterations after one that is not timed: else each call would
be the first after somebody else's and pay for code that the cache has lost, up to twice its own time.
Before each iteration every rank writes its array, as a training step writes its gradients: so each cell
starts with the same state of the caches, and sums don't grow until they overflow. Then a barrier, then the
call. An iteration takes as long as its slowest rank.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from allreduce.transport.control import combine
from benchmarks.measuring.correctness import Checker

LEAST_ITERATIONS, MOST_ITERATIONS = 5, 1000
MOST_BURST = 10
BURST_BYTES = 8 << 20  # a burst moves about as much; from this size on a turn is one iteration
WARMUPS = 5
WARMUP_SHARE = 0.15  # of a size's budget; warming up ends earlier then, unless -w is given


@dataclass(frozen=True)
class Cell:
    """What is timed: `call` on the first elements of `array`."""

    backend: str
    memory: str  # "allocated" or "foreign"
    call: Callable[[np.ndarray], None]
    array: np.ndarray  # as long as the largest size


@dataclass(frozen=True)
class Plan:
    """How often. Without `iterations`, as often as `seconds` allow for one size."""

    seconds: float
    iterations: int | None = None
    warmups: int | None = None


def measure(
    comm: MPI.Intracomm, cells: Sequence[Cell], count: int, plan: Plan, checker: Checker | None
) -> tuple[np.ndarray, list[int | None]]:
    """Time all cells on arrays of `count` elements, and verify them afterwards. Collective.

    Returns seconds of the slowest rank, of shape (cells, iterations), and the number of wrong elements of
    each cell on all ranks (None without a checker).
    """
    turns = [(cell.call, cell.array[:count]) for cell in cells]
    burst = min(max(BURST_BYTES // max(turns[0][1].nbytes, 1), 1), MOST_BURST)
    estimate = _warm_up(comm, turns, plan, burst)
    iterations = plan.iterations
    if iterations is None:
        iterations = min(max(int(plan.seconds / max(estimate, 1e-9)), LEAST_ITERATIONS), MOST_ITERATIONS)
    times = _rounds(comm, turns, iterations, burst)
    return times, [None if checker is None else _verify(call, array, checker) for call, array in turns]


Turns = Sequence[tuple[Callable[[np.ndarray], None], np.ndarray]]


def _rounds(comm: MPI.Intracomm, turns: Turns, iterations: int, burst: int) -> np.ndarray:
    """Seconds of the slowest rank, for each cell and iteration."""
    times = np.zeros((len(turns), iterations))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for start in range(0, iterations, burst):
            for row, (call, array) in enumerate(turns):
                if burst > 1:
                    _time(comm, call, array, np.zeros(1))
                _time(comm, call, array, times[row, start : start + burst])
    finally:
        if collecting:
            gc.enable()
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return times


def _time(comm: MPI.Intracomm, call: Callable[[np.ndarray], None], array: np.ndarray, seconds: np.ndarray) -> None:
    """Fill `seconds` with what the calls take on this rank."""
    clock, barrier = time.perf_counter, comm.Barrier
    for iteration in range(seconds.size):
        array.fill(1)
        barrier()
        begin = clock()
        call(array)
        seconds[iteration] = clock() - begin


def _warm_up(comm: MPI.Intracomm, turns: Turns, plan: Plan, burst: int) -> float:
    """Untimed rounds; returns what an iteration of all cells took, in seconds, the same on all ranks.

    The first call of a size also makes workspace and agreements, so there is always one round.
    """
    spent = last = 0.0
    for done in range(max(plan.warmups if plan.warmups is not None else WARMUPS, 1)):
        if plan.warmups is None and done > 1 and spent + last > WARMUP_SHARE * plan.seconds:
            break
        begin = time.perf_counter()
        _rounds(comm, turns, burst, burst)
        last = float(combine(comm, np.array([time.perf_counter() - begin]), "warm up", MPI.MAX)[0])
        spent += last
    return last / burst


def _verify(call: Callable[[np.ndarray], None], array: np.ndarray, checker: Checker) -> int:
    checker.fill(array)
    call(array)
    return checker.wrong(array)
