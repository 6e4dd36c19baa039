"""What `benchmarks.scaling --fit` prints about the fit: how far off it is, where, and why."""

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.predicting.cost_parts import FITTED, Machine
from benchmarks.predicting.fitting import Cell, Check, Located, Point, cells, is_flat, median_error, untouched


def errors(points: list[Point], machine: Machine) -> dict[str, float]:
    """Median errors: of all points, without and with a network between the ranks."""
    flat = [point for point in points if is_flat(point)]
    rig = [point for point in points if not is_flat(point)]
    groups = {"overall": points, "flat": flat, "rig": rig}
    return {name: median_error(some, machine) for name, some in groups.items() if some}


def lines(
    points: list[Point],
    machine: Machine,
    found: dict[str, float],
    places: list[Located],
    check: Check | None,
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
