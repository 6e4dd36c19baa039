"""Timing, the same for every benchmark: of calls on arrays (`measure`) and of training steps (`take_turns`).

All cells (a contender and an array) take turns: A B C A B C ..., so a machine that drifts hits all of them.
With small arrays a turn is a burst of up to 10 iterations after one that is not timed. Otherwise each call would be the
first after another contender's, and its code would no longer be in the cache, which costs up to twice its own time.
Before each iteration every rank writes its array, as a training step writes its gradients: so each cell
starts with the same state of the caches, and sums don't grow until they overflow. Then a barrier, then the
call. An iteration takes as long as its slowest rank. `Checker` verifies the results, after the timing.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import ml_dtypes
import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, ops
from allreduce.transport.control import combine

PERIOD = 8191  # prime, so that no chunk or segment that lands in the wrong place looks right
ROWS = 64  # periods compared at a time: they fit the cache


class Checker:
    """Fills arrays of one dtype and checks what one operation made of them.

    All ranks' values are known to every rank: they repeat after PERIOD elements and differ between ranks.
    """

    def __init__(self, comm: MPI.Intracomm, dtype: np.dtype, op: str) -> None:
        self._comm = comm
        everyone = np.stack([_values(rank, op) for rank in range(comm.size)])
        self._mine = _typed(everyone[comm.rank], dtype)
        self._low, self._high = _bounds(everyone, dtype, op)

    def fill(self, array: np.ndarray) -> None:
        """Put this rank's values into a 1-D array."""
        rows = _rows(array)
        rows[:] = self._mine
        rest = array[rows.size :]
        rest[:] = self._mine[: rest.size]

    def wrong(self, array: np.ndarray) -> int:
        """The number of wrong elements on all ranks, of an array that was filled and reduced. Collective."""
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
    """One period in float64: whole numbers from -20 to 40; products stay small because most factors are 1 or -1."""
    index = np.arange(PERIOD)
    mixed = (index * 17 + rank * 29 + index * rank % 7) % 61
    if op != "prod":
        return (mixed - 20).astype(np.float64)
    return np.where(mixed % 2, 1.0, -1.0) * np.where((index + rank) % 61 == 0, 3.0, 1.0)


def _typed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Whole numbers as another dtype: of integers too short for them their last bits."""
    return values.astype(np.int64).astype(dtype)


def _bounds(everyone: np.ndarray, dtype: np.dtype, op: str) -> tuple[np.ndarray, np.ndarray]:
    """The least and largest right results: exact for integers and max/min, else a rounding error per summand."""
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
    slack = size * (1 if op == "mean" else len(everyone)) * _epsilon(dtype)
    return (exact - slack).astype(accumulator), (exact + slack).astype(accumulator)


def _epsilon(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


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


# Steps of a training: as long as a call of everything that takes part, one after another


def take_turns(
    comm: MPI.Intracomm, steps: Mapping[str, Callable[[], object]], turns: int, warmups: int
) -> dict[str, list[float]]:
    """Seconds of each step of the slowest rank: one step of each in turn, after some that are not timed. Collective."""
    times = np.zeros((len(steps), warmups + turns))
    for turn in range(warmups + turns):
        for row, step in enumerate(steps.values()):
            comm.Barrier()
            begin = time.perf_counter()
            step()
            times[row, turn] = time.perf_counter() - begin
    return dict(zip(steps, slowest(comm, times[:, warmups:]).tolist(), strict=True))


def slowest(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    """The largest of all ranks' values, element by element. Collective."""
    found = np.ascontiguousarray(values)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return found


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds of the steps of one kind."""
    p90 = sorted(seconds)[-1 - len(seconds) // 10]
    return {"median_ms": 1e3 * median(seconds), "min_ms": 1e3 * min(seconds), "p90_ms": 1e3 * p90}


def table(times: Mapping[str, Sequence[float]], reference: str | None = None) -> str:
    """A line for each kind of step. reference: the kind whose median is compared with all others'."""
    width = max(map(len, times)) + 2
    versus = f"  / {reference}" if reference else ""
    lines = [f"{'':<{width}}{'steps':>6}{'median ms':>11}{'min':>9}{'p90':>9}{'max':>9}{versus}"]
    for name, each in times.items():
        if len(each):
            row = summary(each)
            line = f"{name:<{width}}{len(each):>6}{row['median_ms']:>11.1f}{row['min_ms']:>9.1f}{row['p90_ms']:>9.1f}"
            ratio = (
                f"{median(each) / median(times[reference]):>{len(versus)}.2f}"
                if reference and len(times[reference])
                else ""
            )
            lines.append(f"{line}{1e3 * max(each):>9.1f}{ratio}")
    return "\n".join(lines)
