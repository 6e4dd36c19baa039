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
class Cell:
    """The median error of a backend in a range of sizes."""

    backend: str
    range: str
    points: int
    error: float
    reason: str = ""


@dataclass(frozen=True)
class PlaceFit:
    """The error of the predictions for one place."""

    place: str
    points: int
    error: float  # median
    held_out: float | None  # error of a fit to all other places; None if there are none
    spread: float  # median of (median / minimum) of the points
    note: str = ""


def median_error(points: Sequence[Point], machine: Machine) -> float:
    """Return the median of the absolute errors."""
    return median(abs(point.error(machine)) for point in points)


def errors(points: list[Point], machine: Machine) -> dict[str, float]:
    """Return the median errors: of all points, without a network, and with one."""
    groups = {"overall": points, "flat": [each for each in points if each.flat]}
    groups["rig"] = [each for each in points if not each.flat]
    return {name: median_error(some, machine) for name, some in groups.items() if some}


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
        spread = median(point.spread for point in some)
        found.append(PlaceFit(place.name, len(some), median_error(some, machine), unseen, spread, note))
    return found


def disturbed(points: Sequence[Point]) -> dict[Layout, float]:
    """Return the fraction of each place's times that more ranks on the same cores beat, although they do more work.

    No formula can predict such times: other programs ran during the measurement. Only places with a fraction above
    DISTURBED are returned.
    """
    flat = [point for point in points if point.flat and point.backend in GROWING]
    found: dict[Layout, float] = {}
    for place in dict.fromkeys(point.place for point in flat):
        some = [point for point in flat if point.place == place]
        beaten = sum(any(_beats(other, point) for other in flat) for point in some)
        if beaten > DISTURBED * len(some):
            found[place] = beaten / len(some)
    return found


def _beats(other: Point, point: Point) -> bool:
    """Whether the same call took clearly less time on more ranks."""
    same = (other.backend, other.nbytes, other.allocated) == (point.backend, point.nbytes, point.allocated)
    return same and other.place.ranks > point.place.ranks and other.seconds * (1 + LIMIT) < point.seconds


def _reason(points: Sequence[Point], machine: Machine, busy: dict[Layout, float], error: float) -> str:
    """Return the likeliest reason for an error above LIMIT, with the places of the largest errors; "" for others."""
    if error <= LIMIT:
        return ""
    worst = [point for point in points if abs(point.error(machine)) > LIMIT]
    scatter = (
        f"the times themselves scatter, the median is {median(each.spread for each in worst):.1f} times the minimum"
    )
    crowded = [point.place.per_core > 1 for point in worst]
    reasons = (  # the first one that holds for more than half of the points
        ([point.place in busy for point in worst], "the machine was busy (more ranks on the same cores were faster)"),
        ([point.spread > SCATTERED for point in worst], scatter),
        (
            [many and not point.flat for many, point in zip(crowded, worst, strict=True)],
            "ranks outnumber cores, and packets wait for a core too, by a time that depends on the scheduler",
        ),
        (
            crowded,
            "ranks outnumber cores, and times depend on the scheduler, which the model describes by one constant",
        ),
        (
            [point.backend == "native" for point in worst],
            "the MPI library changes algorithms with sizes and ranks, and the model has two of them",
        ),
        ([not point.flat for point in worst], "the model has no queues in links and no congestion control"),
        ([True], "the model has only one cost per message and one per byte for Python, the MPI library and all caches"),
    )
    reason = next(text for holds, text in reasons if 2 * sum(holds) > len(holds))
    return f"measured {_worst_places(points, machine)}: {reason}"


def _worst_places(points: Sequence[Point], machine: Machine) -> str:
    """Return the two places with the largest errors: "slower than predicted at 4 ranks, faster at 2+2 ranks"."""
    errors: dict[Layout, list[float]] = {}
    for point in points:
        errors.setdefault(point.place, []).append(point.error(machine))
    worst = sorted(errors, key=lambda place: -median(map(abs, errors[place])))[:2]
    places = [f"{'slower' if median(errors[place]) < 0 else 'faster'} at {place.name}" for place in worst]
    return ", ".join(places).replace(" at ", " than predicted at ", 1)


def untouched(points: Sequence[Point], machine: Machine) -> list[str]:
    """Return the constants that no point depends on, so that they were not fitted."""
    names = []
    for name in FITTED:
        changed: dict[str, Any] = {name: getattr(machine, name) * 1.5}
        other = replace(machine, **changed)
        if all(abs(point.predicted(other) / point.predicted(machine) - 1) < 1e-9 for point in points):
            names.append(name)
    return names


def lines(points: list[Point], machine: Machine, found: dict[str, float], places: list[PlaceFit]) -> list[str]:
    """Return the report: the constants, the errors by backend and size, and by place."""
    kept = untouched(points, machine)
    medians = ", ".join(f"{name} {error:.0%}" for name, error in found.items())
    text = [f"# Fitted to {len(points)} times. Median error: {medians}. Constants:"]
    for name, value in asdict(machine).items():
        note = "  (not in these runs: the default)" if name in kept else ""
        text.append(f"#   {name:<12}{value:>12.4g}{note}")
    rows = [
        (each.backend, each.range, each.points, f"{each.error:.0%}", each.reason) for each in cells(points, machine)
    ]
    text += columns(["backend", "sizes", "points", "median error", ""], rows, left=(0, 1, 4))
    unseen = ["-" if each.held_out is None else f"{each.held_out:.0%}" for each in places]
    about = [
        (each.place, each.points, f"{each.error:.0%}", held_out, f"{each.spread:.2f}", each.note)
        for each, held_out in zip(places, unseen, strict=True)
    ]
    text += columns(["place", "points", "median error", "held out", "median/least", ""], about, left=(0, 5))
    return [
        *text,
        "# held out: predicted by a fit to all other places; median/least: how much the times themselves scatter",
    ]
