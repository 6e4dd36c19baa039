"""Fits the constants of the cost formulas to measured runs, and reports them and the errors of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from allreduce.transport.cost import Layout, Machine
from benchmarks.lib.results import FileError, Run, load
from benchmarks.predicting.costs import backends, predict

PRIOR = 0.003  # weight that pulls a constant to its start value; decides only constants that the data do not determine
ROBUST = 0.1  # errors above this count linearly, not squared: a busy machine has outliers
FITTED = tuple(Machine.__dataclass_fields__)
LIMIT = 0.2  # errors above this are reported with a reason
# These backends can't become faster with more ranks on the same cores, because the work grows.
GROWING = ("ring", "reduce_to_one", "shared", "hierarchical_copy")
SCATTERED = 1.5  # median / minimum above which the machine was doing something else
DISTURBED = 0.3  # a place is disturbed if more ranks on the same cores beat a larger fraction of its times by LIMIT
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

    def predicted(self, machine: Machine) -> float:
        return predict(self.backend, machine, self.place, self.nbytes, self.allocated)

    def error(self, machine: Machine) -> float:
        """Return the signed relative error of the prediction."""
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
    """Read the points of files of `benchmarks.bandwidth --json`. Raises FileError or OSError, which names the bad file.

    one_machine: the nodes were simulated by cluster_sim.sh, so they share one machine's cores. Nodes that
        ranks_per_node= simulates have no network, and are left out.
    """
    points, runs = [], []
    for path in paths:
        run = load(path)
        found = list(_points(run, one_machine, statistic))
        if not found:
            raise FileError(f"{path}: it holds no time of {', '.join(backends())} on two ranks or more")
        if run.dtype not in ("float32", "float64"):
            raise FileError(
                f"{path}: it measured {run.dtype}; the model is of float32 and float64, which are summed as they are"
            )
        points += found
        runs.append(run)
    return points, runs


def _points(run: Run, one_machine: bool, statistic: str) -> Iterable[Point]:
    if run.simulated and len(run.node_sizes) > 1:
        return
    cores = int(run.machine.get("cores") or 0)
    place = Layout(tuple(run.node_sizes), cores=cores, sharing=run.ranks if one_machine else 0)
    for each in run.results:
        seconds = (each.min_us if statistic == "min" else each.time_us) * 1e-6
        if each.backend in backends() and run.ranks > 1 and each.size > 0 and seconds > 0:
            yield Point(each.backend, place, each.size, each.memory == "allocated", seconds, each.time_us / each.min_us)


def fit(points: Sequence[Point], start: Machine, rounds: int = 60, first: Machine | None = None) -> Machine:
    """Fit the constants to the points, by the Huber loss of the logarithms of times. Needs SciPy.

    Constants that no point depends on keep their values of `start`. first: the starting point of the search.
    """
    from scipy.optimize import least_squares

    if not points:
        raise ValueError("there is nothing to fit to")
    origin = _logarithms(start)

    def residuals(values: np.ndarray) -> np.ndarray:
        machine = _machine(start, values)
        errors = [point.weight * log(point.predicted(machine) / point.seconds) for point in points]
        return np.concatenate([errors, PRIOR * np.sqrt(len(points)) * (values - origin)])

    found = least_squares(
        residuals, _logarithms(first or start), loss="huber", f_scale=ROBUST, diff_step=1e-5, ftol=1e-5, max_nfev=rounds
    )
    return _machine(start, found.x)


def _logarithms(machine: Machine) -> np.ndarray:
    return np.array([log(getattr(machine, name)) for name in FITTED])


def _machine(start: Machine, values: np.ndarray) -> Machine:
    fitted: dict[str, Any] = {name: exp(value) for name, value in zip(FITTED, values, strict=True)}
    return replace(start, **fitted)


# ---- The errors of the model ----


def median_error(points: Sequence[Point], machine: Machine) -> float:
    """Return the median of the absolute errors."""
    return median(abs(point.error(machine)) for point in points)


def cells(points: Sequence[Point], machine: Machine) -> list[Cell]:
    """Return the median error of each backend in each range of sizes, with a reason if it is above LIMIT."""
    found, busy = [], disturbed(points)
    for backend in backends():
        for name, low, high in RANGES:
            some = [point for point in points if point.backend == backend and low < point.nbytes <= high]
            if some:
                error = median_error(some, machine)
                found.append(Cell(backend, name, len(some), error, _reason(some, machine, busy, error)))
    return found


def disturbed(points: Sequence[Point]) -> dict[Layout, float]:
    """Return the fraction of each place's times that more ranks on the same cores beat, although they do more work.

    No formula can predict such times: other programs ran during the measurement. Only places with a fraction above
    DISTURBED are returned.
    """
    best: dict[tuple[str, int, bool], list[tuple[int, float]]] = {}
    flat = [point for point in points if point.place.nodes == 1 and point.backend in GROWING]
    for point in flat:
        best.setdefault((point.backend, point.nbytes, point.allocated), []).append((point.place.ranks, point.seconds))
    found = {}
    for place in dict.fromkeys(point.place for point in flat):
        some = [point for point in flat if point.place == place]
        beaten = [
            any(n > place.ranks and seconds * (1 + LIMIT) < point.seconds for n, seconds in best[key])
            for point in some
            if (key := (point.backend, point.nbytes, point.allocated))
        ]
        if sum(beaten) > DISTURBED * len(some):
            found[place] = sum(beaten) / len(some)
    return found


def _reason(points: Sequence[Point], machine: Machine, busy: dict[Layout, float], error: float) -> str:
    """Return the likeliest reason for an error above LIMIT, with the places of the largest errors; "" for others."""
    if error <= LIMIT:
        return ""
    worst = [point for point in points if abs(point.error(machine)) > LIMIT]
    where = f"measured {_worst_places(points, machine)}: "
    oversubscribed = [point for point in worst if point.place.per_core > 1]
    linked = [point for point in worst if not is_flat(point)]
    half = len(worst) / 2
    if sum(point.place in busy for point in worst) > half:
        return where + "the machine was busy (more ranks on the same cores were faster)"
    if sum(point.spread > SCATTERED for point in worst) > half:
        return where + f"the times themselves scatter, the median is {_spread(worst):.1f} times the minimum"
    if len(oversubscribed) > half and sum(point in linked for point in oversubscribed) > half:
        return where + "ranks outnumber cores, and packets wait for a core too, by a time that depends on the scheduler"
    if len(oversubscribed) > half:
        return (
            where
            + "ranks outnumber cores, and times depend on the scheduler, which the model describes by one constant"
        )
    if points[0].backend == "native":
        return where + "the MPI library changes algorithms with sizes and ranks, and the model has two of them"
    if len(linked) > half:
        return where + "the model has no queues in links and no congestion control"
    return where + "the model has only one cost per message and one per byte for Python, the MPI library and all caches"


def _spread(points: Sequence[Point]) -> float:
    return median(point.spread for point in points)


def _worst_places(points: Sequence[Point], machine: Machine) -> str:
    """Return the two places with the largest errors: "slower than predicted at 4 ranks, faster at 2+2 ranks"."""
    errors: dict[Layout, list[float]] = {}
    for point in points:
        errors.setdefault(point.place, []).append(point.error(machine))
    worst = sorted(errors, key=lambda place: -median(map(abs, errors[place])))[:2]
    places = [f"{'slower' if median(errors[place]) < 0 else 'faster'} at {place.name}" for place in worst]
    return ", ".join(places).replace(" at ", " than predicted at ", 1)


@dataclass(frozen=True)
class PlaceFit:
    """The error of the predictions for one place."""

    place: str
    points: int
    error: float  # median
    held_out: float | None  # error of a fit to all other places; None if there are none
    spread: float  # median of (median / minimum) of the points
    note: str = ""


def by_place(points: Sequence[Point], machine: Machine, start: Machine) -> list[PlaceFit]:
    """Return for each place the error of the fit, and of a fit to all other places."""
    busy, found = disturbed(points), []
    for place in dict.fromkeys(point.place for point in points):
        some = [point for point in points if point.place == place]
        others = [point for point in points if point.place != place]
        unseen = median_error(some, fit(others, start, first=machine)) if others else None
        uneven = sum(point.spread > SCATTERED for point in some) / len(some)
        note = f"unsteady: {uneven:.0%} have a median above {SCATTERED} times the minimum" if uneven > DISTURBED else ""
        if place in busy:
            note = f"disturbed: more ranks on the same cores beat {busy[place]:.0%} of these times"
        found.append(PlaceFit(place.name, len(some), median_error(some, machine), unseen, _spread(some), note))
    return found


def is_flat(point: Point) -> bool:
    """Whether a point was measured without a network."""
    return point.place.nodes == 1


def untouched(points: Sequence[Point], machine: Machine) -> list[str]:
    """Return the constants that no point depends on, so that they were not fitted."""
    names = []
    for name in FITTED:
        changed: dict[str, Any] = {name: getattr(machine, name) * 1.5}
        other = replace(machine, **changed)
        if all(abs(point.predicted(other) / point.predicted(machine) - 1) < 1e-9 for point in points):
            names.append(name)
    return names


def errors(points: list[Point], machine: Machine) -> dict[str, float]:
    """Return the median errors: of all points, without a network, and with one."""
    flat = [point for point in points if is_flat(point)]
    rig = [point for point in points if not is_flat(point)]
    groups = {"overall": points, "flat": flat, "rig": rig}
    return {name: median_error(some, machine) for name, some in groups.items() if some}


def lines(points: list[Point], machine: Machine, found: dict[str, float], places: list[PlaceFit]) -> list[str]:
    kept = untouched(points, machine)
    medians = ", ".join(f"{name} {error:.0%}" for name, error in found.items())
    text = [f"# Fitted to {len(points)} times. Median error: {medians}. Constants:"]
    for name, value in asdict(machine).items():
        note = "  (not in these runs: the default)" if name in kept else ""
        text.append(f"#   {name:<12}{value:>12.4g}{note}")
    text += _cells(cells(points, machine))
    text.append(f"# {'place':<20}{'points':>7}{'median error':>14}{'held out':>10}{'median/least':>14}")
    for place in places:
        unseen = "-" if place.held_out is None else f"{place.held_out:.0%}"
        row = f"  {place.place:<20}{place.points:>7}{place.error:>14.0%}{unseen:>10}{place.spread:>14.2f}"
        text.append(f"{row}  {place.note}".rstrip())
    return [
        *text,
        "# held out: predicted by a fit to all other places; median/least: how much the times themselves scatter",
    ]


def _cells(found: list[Cell]) -> list[str]:
    text = [f"# {'backend':<20}{'sizes':<16}{'points':>7}{'median error':>14}"]
    for cell in found:
        text.append(f"  {cell.backend:<20}{cell.range:<16}{cell.points:>7}{cell.error:>14.0%}  {cell.reason}".rstrip())
    return text
