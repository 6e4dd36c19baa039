"""Fits the constants of the cost model to measured runs, and says how well it then predicts them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cost_model import FITTED, FORMULAS, Machine, Place, predict
from benchmarks.results import FileError, Run, load

PRIOR = 0.003  # how strongly a constant stays where it began: enough for those that the data say nothing about
ROBUST = 0.1  # errors beyond this count linearly, not squared: a busy machine has outliers
RANGES = (("up to 4 KiB", 0, 4096), ("to 512 KiB", 4096, 512 << 10), ("above 512 KiB", 512 << 10, float("inf")))


@dataclass(frozen=True)
class Point:
    """One measured time."""

    backend: str
    place: Place
    nbytes: int
    allocated: bool
    seconds: float

    def predicted(self, machine: Machine) -> float:
        return predict(self.backend, machine, self.place, self.nbytes, self.allocated)

    def error(self, machine: Machine) -> float:
        """Relative error of the prediction, signed."""
        return self.predicted(machine) / self.seconds - 1


@dataclass(frozen=True)
class Cell:
    """The median error of a backend in a range of sizes."""

    backend: str
    range: str
    points: int
    error: float
    reason: str = ""


def read(
    paths: Iterable[str], *, one_machine: bool = False, statistic: str = "median"
) -> tuple[list[Point], list[Run]]:
    """The points of files of `benchmarks.bandwidth --json`; FileError or OSError names the file that is bad.

    one_machine: the nodes were made by cluster_sim.sh, so they share one machine's cores.
    """
    points, runs = [], []
    for path in paths:
        run = load(path)
        found = list(_points(run, one_machine, statistic))
        if not found:
            raise FileError(f"{path}: it holds no time of {', '.join(FORMULAS)} on two ranks or more")
        if run.dtype not in ("float32", "float64"):
            raise FileError(
                f"{path}: it measured {run.dtype}; the model is of float32 and float64, which are not widened"
            )
        points += found
        runs.append(run)
    return points, runs


def _points(run: Run, one_machine: bool, statistic: str) -> Iterable[Point]:
    place = Place(tuple(run.node_sizes), one_machine or run.simulated, not run.simulated)
    for each in run.results:
        seconds = (each.min_us if statistic == "min" else each.time_us) * 1e-6
        if each.backend in FORMULAS and run.ranks > 1 and each.size > 0 and seconds > 0:
            yield Point(each.backend, place, each.size, each.memory == "allocated", seconds)


def fit(points: Sequence[Point], start: Machine, rounds: int = 60) -> Machine:
    """The constants with the least error of log times: Levenberg and Marquardt's steps on their logarithms.

    Constants that the points say nothing about keep their values in `start`.
    """
    if not points:
        raise ValueError("there is nothing to fit to")
    origin = np.array([log(getattr(start, name)) for name in FITTED])
    values, damping = origin.copy(), 1e-2
    residuals = _residuals(points, start, values, origin)
    for _ in range(rounds):
        weights = np.minimum(1, np.sqrt(ROBUST / np.maximum(np.abs(residuals), 1e-12)))
        slopes = _slopes(points, start, values, origin, residuals)
        system = np.vstack([slopes * weights[:, None], np.sqrt(damping) * np.eye(len(FITTED))])
        wanted = np.concatenate([-residuals * weights, np.zeros(len(FITTED))])
        step = np.clip(np.linalg.lstsq(system, wanted, rcond=None)[0], -1, 1)
        tried = _residuals(points, start, values + step, origin)
        if _cost(tried) < _cost(residuals):
            done = _cost(residuals) - _cost(tried) < 1e-6 * _cost(residuals)
            values, residuals, damping = values + step, tried, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return _machine(start, values)


def _machine(start: Machine, values: np.ndarray) -> Machine:
    fitted: dict[str, Any] = {name: exp(value) for name, value in zip(FITTED, values, strict=True)}
    return replace(start, **fitted)


def _residuals(points: Sequence[Point], start: Machine, values: np.ndarray, origin: np.ndarray) -> np.ndarray:
    machine = _machine(start, values)
    errors = [log(point.predicted(machine) / point.seconds) for point in points]
    return np.concatenate([errors, PRIOR * np.sqrt(len(points)) * (values - origin)])


def _slopes(
    points: Sequence[Point], start: Machine, values: np.ndarray, origin: np.ndarray, residuals: np.ndarray
) -> np.ndarray:
    """How the residuals change with each constant."""
    step, columns = 1e-4, []
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += step
        columns.append((_residuals(points, start, moved, origin) - residuals) / step)
    return np.stack(columns, axis=1)


def _cost(residuals: np.ndarray) -> float:
    """Huber's loss."""
    size = np.abs(residuals)
    return float(np.where(size < ROBUST, size**2, 2 * ROBUST * size - ROBUST**2).sum())


# ---- How good it is ----


def median_error(points: Sequence[Point], machine: Machine) -> float:
    """Median over the points of the error, unsigned."""
    return median(abs(point.error(machine)) for point in points)


def cells(points: Sequence[Point], machine: Machine) -> list[Cell]:
    """The median error of each backend in each range of sizes, and why where it is above 20 %."""
    found = []
    for backend in FORMULAS:
        for name, low, high in RANGES:
            some = [point for point in points if point.backend == backend and low < point.nbytes <= high]
            if some:
                error = median_error(some, machine)
                found.append(Cell(backend, name, len(some), error, _reason(some, machine) if error > 0.2 else ""))
    return found


def _reason(points: Sequence[Point], machine: Machine) -> str:
    """What the model leaves out that most likely explains a large error."""
    worst = [point for point in points if abs(point.error(machine)) > 0.2]
    first = worst[0]
    slow = median(point.error(machine) for point in worst) < 0
    told = "measured slower than predicted" if slow else "measured faster than predicted"
    crowded = sum(point.place.together > machine.cores for point in worst)
    if crowded > len(worst) / 2:
        return f"{told}, mostly where ranks outnumber cores: then times hang on the scheduler, which no formula knows"
    if first.backend == "native":
        return f"{told}: the MPI library changes algorithms with sizes and ranks, and the model has two of them"
    if any(point.place.m > 1 and point.place.linked for point in worst):
        return f"{told}: the model has no queues in links and no congestion control"
    if first.nbytes > RANGES[1][2]:
        return f"{told}: one cache size and one memory speed stand for the whole hierarchy"
    return f"{told}: one cost a message stands for all of Python and the MPI library"


@dataclass(frozen=True)
class Check:
    """Fitted to some rank counts, held against the others."""

    fitted_to: tuple[int, ...]
    held_out: tuple[int, ...]
    error: float  # median over the points held out
    cells: list[Cell]


def leave_out(points: Sequence[Point], start: Machine) -> Check | None:
    """Fit to the runs of 2 and 4 ranks (or the two smallest counts) and predict the others."""
    counts = sorted({point.place.n for point in points})
    if len(counts) < 3:
        return None
    kept = (2, 4) if {2, 4} <= set(counts) else tuple(counts[:2])
    machine = fit([point for point in points if point.place.n in kept], start)
    others = [point for point in points if point.place.n not in kept]
    held = tuple(count for count in counts if count not in kept)
    return Check(kept, held, median_error(others, machine), cells(others, machine))


def untouched(points: Sequence[Point], machine: Machine) -> list[str]:
    """Constants that no point depends on, so that they were not fitted."""
    names = []
    for name in FITTED:
        changed: dict[str, Any] = {name: getattr(machine, name) * 1.5}
        other = replace(machine, **changed)
        if all(abs(point.predicted(other) / point.predicted(machine) - 1) < 1e-9 for point in points):
            names.append(name)
    return names
