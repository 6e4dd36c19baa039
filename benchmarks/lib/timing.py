"""Timing for all benchmarks: of calls on arrays (`measure`), and of training steps (`take_turns`).

All cells (a contender and an array) take turns: A B C, C A B, ..., so a drifting machine affects all of them alike. The
order of each round is drawn at random, the same on all ranks: a call on long arrays is up to 1.25 times as fast if the
call before it left its data in the cache, as a call of the same algorithm does. With small arrays a turn is one untimed
iteration and a burst of up to 10 timed ones. Otherwise each call would follow one of another contender, with its code
no longer in the cache, which costs up to twice its own time. Before each iteration every rank writes its array, as a
training step writes its gradients. So each cell starts with the same state of the caches, and sums do not overflow. A
barrier and the call follow. The time of an iteration is that of its slowest rank. `Checker` verifies the results after
the timing.
"""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.transport.control import combine
from benchmarks.lib.columns import columns
from benchmarks.lib.outputs import Screen
from benchmarks.lib.results import COLD, Result, summarize

PERIOD = 8191  # prime, so that a chunk or segment at a wrong position is detected
ROWS = 64  # periods compared at a time: they fit into the cache


class Checker:
    """Fills arrays of one dtype, and checks the results of one operation on them.

    Every rank knows the values of all ranks. They repeat after PERIOD elements and differ between ranks.
    """

    def __init__(self, comm: MPI.Intracomm, dtype: np.dtype, op: str) -> None:
        self._comm = comm
        everyone = np.stack([_values(rank, op) for rank in range(comm.size)])
        self._mine = _typed(everyone[comm.rank], dtype)
        self._low, self._high = _bounds(everyone, dtype, op)

    def fill(self, array: np.ndarray) -> None:
        """Write this rank's values into a 1-D array."""
        rows = _rows(array)
        rows[:] = self._mine
        rest = array[rows.size :]
        rest[:] = self._mine[: rest.size]

    def wrong(self, array: np.ndarray) -> int:
        """Return the number of wrong elements, on all ranks, of an array that was filled and reduced. Collective."""
        rows = _rows(array)
        count = sum(self._outside(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS))
        count += self._outside(array[rows.size :])
        return int(combine(self._comm, np.array([count]), "count wrong elements")[0])

    def _outside(self, values: np.ndarray) -> int:
        wide = values.astype(self._low.dtype, copy=False)
        width = values.shape[-1]
        inside = (wide >= self._low[:width]) & (wide <= self._high[:width])  # false for NaN
        return int(inside.size - np.count_nonzero(inside))


def _rows(array: np.ndarray) -> np.ndarray:
    return array[: array.size // PERIOD * PERIOD].reshape(-1, PERIOD)


def _values(rank: int, op: str) -> np.ndarray:
    """Return one period in float64: integers from -20 to 40; for products mostly 1 and -1, so that they stay small."""
    index = np.arange(PERIOD)
    mixed = (index * 17 + rank * 29 + index * rank % 7) % 61
    if op != "prod":
        return (mixed - 20).astype(np.float64)
    return np.where(mixed % 2, 1.0, -1.0) * np.where((index + rank) % 61 == 0, 3.0, 1.0)


def _typed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert integral float64 values to `dtype`; values too large for an integer dtype wrap around."""
    return values.astype(np.int64).astype(dtype)


def _bounds(everyone: np.ndarray, dtype: np.dtype, op: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest correct results: equal for integers and max/min, else with rounding errors."""
    accumulator, combine_all = dtypes.TYPES[dtype].accumulator, ops.OPS[op].combine.reduce
    exact: np.ndarray
    if dtype.kind in "iub":  # sums wrap round
        exact = combine_all(_typed(everyone, dtype), axis=0, dtype=dtype)
        return exact, exact
    exact = combine_all(everyone, axis=0)
    if op == "mean":
        exact = exact / len(everyone)
    if op in ("max", "min"):
        return exact.astype(accumulator), exact.astype(accumulator)
    size = np.abs(exact) if op == "prod" else np.abs(everyone).sum(axis=0)
    slack = size * (1 if op == "mean" else len(everyone)) * float(ml_dtypes.finfo(dtype).eps)
    return (exact - slack).astype(accumulator), (exact + slack).astype(accumulator)


LEAST_ITERATIONS, MOST_ITERATIONS = 5, 1000
MOST_BURST = 10
BURST_BYTES = 8 << 20  # moved by a burst; for arrays of this size or larger a turn is one iteration
WALKED = np.zeros(8 << 20, np.uint8)  # the work between cold calls
WARMUPS = 5
WARMUP_SHARE = 0.15  # of a size's budget, for warming up; not if -w is given


@dataclass(frozen=True)
class Cell:
    """A timed call: `call` on the first elements of `array`. It reduces them in place, or returns the result."""

    backend: str
    memory: str  # a key of results.TITLES
    call: Callable[[np.ndarray], Any]
    array: np.ndarray  # as long as the largest size


@dataclass(frozen=True)
class Plan:
    """The number of iterations per size; without `iterations`, as many as fit into `seconds`."""

    seconds: float
    iterations: int | None = None
    warmups: int | None = None


def measure(
    comm: MPI.Intracomm, cells: Sequence[Cell], count: int, plan: Plan, checker: Checker | None
) -> tuple[np.ndarray, list[int | None]]:
    """Time all cells on arrays of `count` elements, and verify them afterwards. Collective.

    Returns the seconds of the slowest rank, of shape (cells, iterations), and for each cell the number of wrong
    elements on all ranks (None without a checker).
    """
    turns = [(cell.call, cell.array[:count], cell.memory.endswith(COLD)) for cell in cells]
    burst = min(max(BURST_BYTES // max(turns[0][1].nbytes, 1), 1), MOST_BURST)
    estimate = _warm_up(comm, turns, plan, burst)
    iterations = plan.iterations
    if iterations is None:
        iterations = min(max(int(plan.seconds / max(estimate, 1e-9)), LEAST_ITERATIONS), MOST_ITERATIONS)
    times = _rounds(comm, turns, iterations, burst)
    return times, [None if checker is None else _verify(call, array, checker) for call, array, _ in turns]


def measure_size(
    comm: MPI.Intracomm, cells: Sequence[Cell], size: int, plan: Plan, checker: Checker | None
) -> list[Result]:
    """Return the results of all cells for arrays of `size` bytes. Collective."""
    itemsize = cells[0].array.itemsize
    count = size // itemsize
    times, wrong = measure(comm, cells, count, plan, checker)
    return [
        summarize(cell.backend, cell.memory, count, itemsize, comm.size, seconds, bad)
        for cell, seconds, bad in zip(cells, times, wrong, strict=True)
    ]


Turns = Sequence[tuple[Callable[[np.ndarray], Any], np.ndarray, bool]]


def _rounds(comm: MPI.Intracomm, turns: Turns, iterations: int, burst: int) -> np.ndarray:
    """Return the seconds of the slowest rank, for each cell and iteration."""
    times = np.zeros((len(turns), iterations))
    order, drawn = list(range(len(turns))), random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for start in range(0, iterations, burst):
            drawn.shuffle(order)
            for row in order:
                if burst > 1:
                    _time(comm, *turns[row], np.zeros(1))
                _time(comm, *turns[row], times[row, start : start + burst])
    finally:
        if collecting:
            gc.enable()
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return times


def _time(
    comm: MPI.Intracomm, call: Callable[[np.ndarray], Any], array: np.ndarray, cold: bool, seconds: np.ndarray
) -> None:
    """Write the time of each call on this rank into `seconds`. cold: other work fills the caches before each call."""
    clock, barrier = time.perf_counter, comm.Barrier
    for iteration in range(seconds.size):
        array.fill(1)
        if cold:
            np.add(WALKED, 1, out=WALKED)
        barrier()
        begin = clock()
        call(array)
        seconds[iteration] = clock() - begin


def _warm_up(comm: MPI.Intracomm, turns: Turns, plan: Plan, burst: int) -> float:
    """Run untimed rounds; returns the seconds of one iteration of all cells, the same on all ranks.

    At least one round, because the first call of a size allocates workspace and agrees on it.
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


def _verify(call: Callable[[np.ndarray], Any], array: np.ndarray, checker: Checker) -> int:
    checker.fill(array)
    result = call(array)
    return checker.wrong(array if result is None else result)


# Training steps


def take_turns(
    comm: MPI.Intracomm,
    steps: Mapping[str, Callable[[], object]],
    turns: int,
    warmups: int,
    screen: Screen,
    before: Mapping[str, Callable[[], object]] | None = None,
    after: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Return name -> seconds of each step on the slowest rank. The steps take turns, after warmups. Collective.

    before, after: name -> a function that is called before, or after, each step, and not timed.
    """
    times = np.zeros((len(steps), warmups + turns))
    with screen.bar(warmups + turns, "turn") as bar:
        for turn in range(warmups + turns):
            for row, (name, step) in enumerate(steps.items()):
                if before is not None:
                    before[name]()
                comm.Barrier()
                begin = time.perf_counter()
                step()
                times[row, turn] = time.perf_counter() - begin
                if after is not None:
                    after[name]()
            bar.update()
    return dict(zip(steps, slowest(comm, times[:, warmups:]).tolist(), strict=True))


def slowest(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    """Return the largest value of all ranks, element by element. Collective."""
    found = np.ascontiguousarray(values)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return found


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and 90th percentile in milliseconds."""
    p90 = sorted(seconds)[-1 - len(seconds) // 10]
    return {"median_ms": 1e3 * median(seconds), "min_ms": 1e3 * min(seconds), "p90_ms": 1e3 * p90}


def table(times: Mapping[str, Sequence[float]], *references: str) -> str:
    """Return a line for each kind of step. references: kinds; the medians of all kinds are divided by theirs."""
    known = [name for name in references if times.get(name)]
    rows = []
    for name, each in times.items():
        if each:
            shown = (f"{value:.1f}" for value in (*summary(each).values(), 1e3 * max(each)))
            rows.append([name, len(each), *shown, *(f"{median(each) / median(times[other]):.2f}" for other in known)])
    return "\n".join(columns(["", "steps", "median ms", "min", "p90", "max", *(f"/ {name}" for name in known)], rows))
