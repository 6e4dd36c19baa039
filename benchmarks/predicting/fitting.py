"""Fits the constants of the cost model to measured runs, reports them, and says how well the model then predicts."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from benchmarks.lib.results import FileError, Run, load
from benchmarks.predicting.costs import FITTED, FORMULAS, Cluster, Machine, predict

PRIOR = 0.003  # how strongly a constant stays where it began: enough for those that the data say nothing about
ROBUST = 0.1  # errors beyond this count linearly, not squared: a busy machine has outliers
RIG_BURST = 128 * 1024  # bytes that a link of cluster_sim.sh lets through after a pause, at 1 Gb/s
LIMIT = 0.2  # an error above this is named, with a reason
# More ranks on the same cores can't make these faster: they do more work, whatever the number is a power of.
GROWING = ("ring", "reduce_to_one", "shared", "hierarchical_copy")
SCATTERED = 1.5  # a median of so many times the least was measured beside something else
DISTURBED = 0.3  # part of a place's times that more ranks beat by LIMIT; then something else was running
STEADY = 1.2  # a median of so many times the least is usual on a machine that does nothing else
RANGES = (("up to 4 KiB", 0, 4096), ("to 512 KiB", 4096, 512 << 10), ("above 512 KiB", 512 << 10, float("inf")))


@dataclass(frozen=True)
class Point:
    """One measured time."""

    backend: str
    place: Cluster
    nbytes: int
    allocated: bool
    seconds: float
    spread: float = 1.0  # of the run: this time, which is the median, as a multiple of the least

    @property
    def weight(self) -> float:
        """In a fit: the more the run's own times scatter, the less their median says."""
        return min(1.0, log(STEADY) / log(self.spread)) if self.spread > STEADY else 1.0

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
    place = Cluster(tuple(run.node_sizes), one_machine or run.simulated, not run.simulated)
    for each in run.results:
        seconds = (each.min_us if statistic == "min" else each.time_us) * 1e-6
        if each.backend in FORMULAS and run.ranks > 1 and each.size > 0 and seconds > 0:
            yield Point(each.backend, place, each.size, each.memory == "allocated", seconds, each.time_us / each.min_us)


def fit(points: Sequence[Point], start: Machine, rounds: int = 60, first: Machine | None = None) -> Machine:
    """The constants with the least error of log times, by Huber's loss. Needs SciPy.

    Constants that the points say nothing about keep their values in `start`. first: where to begin to search.
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


# ---- How good it is ----


def median_error(points: Sequence[Point], machine: Machine) -> float:
    """Median over the points of the error, unsigned."""
    return median(abs(point.error(machine)) for point in points)


def cells(points: Sequence[Point], machine: Machine) -> list[Cell]:
    """The median error of each backend in each range of sizes, and why where it is above LIMIT."""
    found, busy = [], disturbed(points)
    for backend in FORMULAS:
        for name, low, high in RANGES:
            some = [point for point in points if point.backend == backend and low < point.nbytes <= high]
            if some:
                error = median_error(some, machine)
                found.append(Cell(backend, name, len(some), error, _reason(some, machine, busy, error)))
    return found


def disturbed(points: Sequence[Point]) -> dict[Cluster, float]:
    """Part of each node's times that more ranks on the same cores beat by LIMIT, though they have more to do.

    No formula can predict those: something else was running while they were measured. Only places where that
    part is larger than DISTURBED are in it.
    """
    best: dict[tuple[str, int, bool], list[tuple[int, float]]] = {}
    flat = [point for point in points if point.place.m == 1 and point.backend in GROWING]
    for point in flat:
        best.setdefault((point.backend, point.nbytes, point.allocated), []).append((point.place.n, point.seconds))
    found = {}
    for place in dict.fromkeys(point.place for point in flat):
        some = [point for point in flat if point.place == place]
        beaten = [
            any(n > place.n and seconds * (1 + LIMIT) < point.seconds for n, seconds in best[key])
            for point in some
            if (key := (point.backend, point.nbytes, point.allocated))
        ]
        if sum(beaten) > DISTURBED * len(some):
            found[place] = sum(beaten) / len(some)
    return found


def _reason(points: Sequence[Point], machine: Machine, busy: dict[Cluster, float], error: float) -> str:
    """What the model leaves out that most likely explains an error above LIMIT, and where it is largest."""
    if error <= LIMIT:
        return ""
    worst = [point for point in points if abs(point.error(machine)) > LIMIT]
    told = f"measured {_worst_places(points, machine)}: "
    oversubscribed = [point for point in worst if point.place.together > machine.cores]
    linked = [point for point in worst if point.place.m > 1 and point.place.linked]
    half = len(worst) / 2
    if sum(point.place in busy for point in worst) > half:
        return told + "the machine was busy then (more ranks on the same cores were faster)"
    if sum(point.spread > SCATTERED for point in worst) > half:
        return told + f"the times themselves scatter, the median is {_spread(worst):.1f} times the least"
    if len(oversubscribed) > half and sum(point in linked for point in oversubscribed) > half:
        return told + "ranks outnumber cores, and a packet waits for a core too: a turn, or a slice of the scheduler's"
    if len(oversubscribed) > half:
        return told + "ranks outnumber cores, and times hang on the scheduler, which the model knows as one constant"
    if points[0].backend == "native":
        return told + "the MPI library changes algorithms with sizes and ranks, and the model has two of them"
    if len(linked) > half:
        return told + "the model has no queues in links and no congestion control"
    return told + "one cost a message, and one a byte, stand for Python, the MPI library and all caches"


def _spread(points: Sequence[Point]) -> float:
    return median(point.spread for point in points)


def _worst_places(points: Sequence[Point], machine: Machine) -> str:
    """The two places with the largest errors: "slower than predicted at 4 ranks, faster at 2+2 ranks"."""
    errors: dict[Cluster, list[float]] = {}
    for point in points:
        errors.setdefault(point.place, []).append(point.error(machine))
    worst = sorted(errors, key=lambda place: -median(map(abs, errors[place])))[:2]
    told = [f"{'slower' if median(errors[place]) < 0 else 'faster'} at {place.name}" for place in worst]
    return ", ".join(told).replace(" at ", " than predicted at ", 1)


@dataclass(frozen=True)
class Located:
    """How well the times of one place are predicted."""

    place: str
    points: int
    error: float  # median
    held_out: float | None  # fitted to all other places; None where there is no other
    spread: float  # median over the points of median over least
    note: str = ""


def by_place(points: Sequence[Point], machine: Machine, start: Machine) -> list[Located]:
    """Each place: the error of the fit, and that of a fit which has not seen this place."""
    busy, found = disturbed(points), []
    for place in dict.fromkeys(point.place for point in points):
        some = [point for point in points if point.place == place]
        others = [point for point in points if point.place != place]
        unseen = median_error(some, fit(others, start, first=machine)) if others else None
        uneven = sum(point.spread > SCATTERED for point in some) / len(some)
        note = f"unsteady: {uneven:.0%} have a median over {SCATTERED} times the least" if uneven > DISTURBED else ""
        if place in busy:
            note = f"disturbed: more ranks on the same cores beat {busy[place]:.0%} of these times"
        found.append(Located(place.name, len(some), median_error(some, machine), unseen, _spread(some), note))
    return found


def is_flat(point: Point) -> bool:
    """Measured without a network."""
    return point.place.m == 1 or not point.place.linked


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


def errors(points: list[Point], machine: Machine) -> dict[str, float]:
    """Median errors: of all points, without and with a network between the ranks."""
    flat = [point for point in points if is_flat(point)]
    rig = [point for point in points if not is_flat(point)]
    groups = {"overall": points, "flat": flat, "rig": rig}
    return {name: median_error(some, machine) for name, some in groups.items() if some}


def lines(
    points: list[Point], machine: Machine, found: dict[str, float], places: list[Located], check: Check | None
) -> list[str]:
    kept = untouched(points, machine)
    told = ", ".join(f"{name} {error:.0%}" for name, error in found.items())
    text = [f"# Fitted to {len(points)} times. Median error: {told}. Constants:"]
    for name, value in asdict(machine).items():
        note = "  (not in these runs: the default)" if name in kept else "" if name in FITTED else "  (given)"
        text.append(f"#   {name:<12}{value:>12.4g}{note}")
    text += _cells(cells(points, machine))
    text.append(f"# {'place':<20}{'points':>7}{'median error':>14}{'held out':>10}{'median/least':>14}")
    for place in places:
        unseen = "-" if place.held_out is None else f"{place.held_out:.0%}"
        row = f"  {place.place:<20}{place.points:>7}{place.error:>14.0%}{unseen:>10}{place.spread:>14.2f}"
        text.append(f"{row}  {place.note}".rstrip())
    text.append(
        "# held out: predicted by a fit to all other places; median/least: how much the times themselves scatter"
    )
    if check is None:
        return [
            *text,
            "# Runs of three numbers of ranks or more would show how it predicts those it was not fitted to.",
        ]
    told = f"fitted to {_list(check.fitted_to)} ranks it predicts {_list(check.held_out)}"
    return [*text, f"# Held out: {told} ranks with a median error of {check.error:.0%}"]


def _cells(found: list[Cell]) -> list[str]:
    text = [f"# {'backend':<20}{'sizes':<16}{'points':>7}{'median error':>14}"]
    for cell in found:
        text.append(f"  {cell.backend:<20}{cell.range:<16}{cell.points:>7}{cell.error:>14.0%}  {cell.reason}".rstrip())
    return text


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
