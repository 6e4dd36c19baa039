"""Fits the constants of the cost formulas to measured runs, and reports them and the errors of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from allreduce.transport.cost import Layout, Machine
from benchmarks.lib.columns import columns
from benchmarks.lib.results import FileError, Run, load
from benchmarks.predicting.costs import backends, predict

PRIOR = 0.003  # weight that pulls a constant to its start value; decides only constants that the data do not determine
ROBUST = 0.1  # errors above this count linearly, not squared: a busy machine has outliers
FITTED = tuple(Machine.__dataclass_fields__)
STEADY = 1.2  # median / minimum that is normal on an idle machine
RANGES = (("up to 4 KiB", 0, 4096), ("to 512 KiB", 4096, 512 << 10), ("above 512 KiB", 512 << 10, float("inf")))


@dataclass(frozen=True)
class Point:
    """One measured time."""

    backend: str
    place: Layout
    nbytes: int
    allocated: bool
    seconds: float
    spread: float = 1.0  # median / minimum of the run

    @property
    def weight(self) -> float:
        """Weight in the fit; smaller for runs whose times scatter."""
        return min(1.0, log(STEADY) / log(self.spread)) if self.spread > STEADY else 1.0

    @property
    def flat(self) -> bool:
        """Whether it was measured without a network."""
        return self.place.nodes == 1

    def predicted(self, machine: Machine) -> float:
        return predict(self.backend, machine, self.place, self.nbytes, self.allocated)

    def error(self, machine: Machine) -> float:
        """Return the signed relative error of the prediction."""
        return self.predicted(machine) / self.seconds - 1


def read(paths: Iterable[str], *, one_machine: bool = False) -> tuple[list[Point], list[Run]]:
    """Read the points of files of `benchmarks.bandwidth --json`. Raises FileError or OSError, which names the bad file.

    one_machine: the nodes were simulated by cluster_sim.sh, so they share one machine's cores. Nodes that
        ranks_per_node= simulates have no network, and are left out.
    """
    points, runs = [], []
    for path in paths:
        run = load(path)
        found = list(_points(run, one_machine))
        if not found:
            raise FileError(f"{path}: it holds no time of {', '.join(backends())} on two ranks or more")
        if run.dtype not in ("float32", "float64"):
            raise FileError(
                f"{path}: it measured {run.dtype}; the model is of float32 and float64, which are summed as they are"
            )
        points += found
        runs.append(run)
    return points, runs


def _points(run: Run, one_machine: bool) -> Iterable[Point]:
    if run.simulated and run.nodes > 1:
        return
    cores = int(run.machine.get("cores") or 0)
    place = Layout(tuple(run.node_sizes), cores=cores, sharing=run.ranks if one_machine else 0)
    for each in run.results:
        if each.backend in backends() and run.ranks > 1:
            seconds, spread = each.time_us * 1e-6, each.time_us / each.min_us
            yield Point(each.backend, place, each.size, each.memory == "allocated", seconds, spread)


def fit(points: Sequence[Point], start: Machine, rounds: int = 60, first: Machine | None = None) -> Machine:
    """Fit the constants to the points, by the Huber loss of the logarithms of times. Needs SciPy.

    Constants that no point depends on keep their values of `start`. first: the starting point of the search.
    """
    from scipy.optimize import least_squares

    if not points:
        raise ValueError("there is nothing to fit to")
    origin = np.log(list(asdict(start).values()))

    def residuals(values: np.ndarray) -> np.ndarray:
        machine = Machine(*map(exp, values))
        errors = [point.weight * log(point.predicted(machine) / point.seconds) for point in points]
        return np.concatenate([errors, PRIOR * np.sqrt(len(points)) * (values - origin)])

    begin = np.log(list(asdict(first or start).values()))
    found = least_squares(residuals, begin, loss="huber", f_scale=ROBUST, diff_step=1e-5, ftol=1e-5, max_nfev=rounds)
    return Machine(*map(exp, found.x))


# The errors of the model


@dataclass(frozen=True)
class Group:
    """The median error of some points: of a backend in a range of sizes, or of a place.

    held_out: of a place, the error of a fit to all other places; None without others. spread: the median of (median /
    minimum) of the points.
    """

    name: str
    points: int
    error: float
    spread: float
    held_out: float | None = None


def median_error(points: Sequence[Point], machine: Machine) -> float:
    """Return the median of the absolute errors."""
    return median(abs(point.error(machine)) for point in points)


def errors(points: list[Point], machine: Machine) -> dict[str, float]:
    """Return the median errors: of all points, without a network, and with one."""
    groups = {"overall": points, "flat": [each for each in points if each.flat]}
    groups["rig"] = [each for each in points if not each.flat]
    return {name: median_error(some, machine) for name, some in groups.items() if some}


def by_size(points: Sequence[Point], machine: Machine) -> list[Group]:
    """Return the error of each backend in each range of sizes."""
    return [
        _group(f"{backend} {name}", some, machine)
        for backend in backends()
        for name, low, high in RANGES
        if (some := [point for point in points if point.backend == backend and low < point.nbytes <= high])
    ]


def by_place(points: Sequence[Point], machine: Machine, start: Machine) -> list[Group]:
    """Return for each place the error of the fit, and of a fit to all other places."""
    found = []
    for place in dict.fromkeys(point.place for point in points):
        here = [point for point in points if point.place == place]
        others = [point for point in points if point.place != place]
        held_out = median_error(here, fit(others, start, first=machine)) if others else None
        found.append(replace(_group(place.name, here, machine), held_out=held_out))
    return found


def _group(name: str, points: Sequence[Point], machine: Machine) -> Group:
    return Group(name, len(points), median_error(points, machine), median(point.spread for point in points))


def untouched(points: Sequence[Point], machine: Machine) -> list[str]:
    """Return the constants that no point depends on, so that they were not fitted."""
    names = []
    for name in FITTED:
        changed: dict[str, Any] = {name: getattr(machine, name) * 1.5}
        other = replace(machine, **changed)
        if all(abs(point.predicted(other) / point.predicted(machine) - 1) < 1e-9 for point in points):
            names.append(name)
    return names


def lines(points: list[Point], machine: Machine, found: dict[str, float], places: list[Group]) -> list[str]:
    """Return the report: the constants, and the errors by backend and size, and by place."""
    kept = untouched(points, machine)
    medians = ", ".join(f"{name} {error:.0%}" for name, error in found.items())
    text = [f"# Fitted to {len(points)} times. Median error: {medians}. Constants:"]
    for name, value in asdict(machine).items():
        note = "  (not in these runs: the default)" if name in kept else ""
        text.append(f"#   {name:<12}{value:>12.4g}{note}")
    rows = []
    for each in [*by_size(points, machine), *places]:
        held_out = "-" if each.held_out is None else f"{each.held_out:.0%}"
        rows.append((each.name, each.points, f"{each.error:.0%}", held_out, f"{each.spread:.2f}"))
    return [
        *text,
        *columns(["times", "points", "median error", "held out", "median/least"], rows),
        "# held out: predicted by a fit to all other places; median/least: how much the times themselves scatter",
    ]
