"""The picture of a run: busbw and time over size, for allocated and foreign arrays. Needs matplotlib."""

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring.sizes import show
from benchmarks.showing.results import MEMORIES, TITLES, Result, Run
from benchmarks.showing.style import colour, mark, width
from benchmarks.showing.verdict import competing, crossovers, times_of

LABEL_WIDTH = 0.024  # of a panel's width
ROWS = (("busbw", "bus bandwidth (GB/s)"), ("time_us", "time (us)"))


def missing(path: str) -> str | None:
    """Why no picture can be drawn to this path, or None."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        return f'--plot needs matplotlib, which can\'t be imported ({error}); pip install ".[bench]" in the checkout'
    known = FigureCanvasAgg.get_supported_filetypes()
    kind = Path(path).suffix.lstrip(".").lower()
    return None if kind in known else f"--plot {path}: a name that ends in .png, .svg or .pdf is needed"


def draw(run: Run, kind: str = "png") -> bytes:
    """The picture as the content of a file of a kind: "png", "svg", "pdf"."""
    from matplotlib.figure import Figure

    memories = [memory for memory in MEMORIES if run.of(memory)]
    rows = ROWS if run.ranks > 1 else ROWS[1:]  # busbw of one rank is 0
    figure = Figure(figsize=(6.8 * len(memories) + 0.6, 4.4 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots(len(rows), len(memories), sharex=True, sharey="row", squeeze=False)
    for line, (quantity, label) in enumerate(rows):
        for column, memory in enumerate(memories):
            _panel(axes[line][column], run, memory, quantity)
            axes[line][column].set_title(TITLES[memory] if line == 0 else "")
        axes[line][0].set_ylabel(label)
    for last in axes[-1]:
        last.set_xlabel("size")
    machine = run.machine
    figure.suptitle(
        f"AllReduce of {run.dtype} ({run.op}), {run.place()}\n{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['mpi']}, {run.date[:10]}",
        fontsize=12,
        parse_math=False,  # nothing that comes from a machine or a file is a formula
    )
    handles = {handle.get_label(): handle for axis in axes.flat for handle in axis.get_legend_handles_labels()[0]}
    legend = figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=5, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    return content.getvalue()


def ticks(run: Run) -> list[int]:
    """Sizes to label on an axis: powers of 8 from the smallest to the largest size."""
    sizes = [result.size for result in run.results]
    powers = [8**power for power in range(1, 14)]
    return [power for power in powers if min(sizes) <= power <= max(sizes)] or sorted(set(sizes))


def points(run: Run, memory: str, backend: str) -> list[Result]:
    """A backend's curve."""
    return sorted((each for each in run.of(memory) if each.backend == backend), key=lambda each: each.size)


def apart(places: Sequence[float], width: float, run: Run) -> list[float]:
    """Where the upright labels of lines at these sizes end on the right, on an axis of the logarithm of the size.

    A label stands left of its line. Where lines are closer than the labels, those stand side by side, left of them all.
    places: rising. width: of a label, as a share of the axis.
    """
    sizes = [result.size for result in run.results]
    factor = (max(sizes) / min(sizes)) ** width
    ends: list[float] = []
    crowd: list[float] = []
    for place, after in pairwise([*places, math.inf]):
        crowd.append(place)
        if after > place * factor**2:
            ends += [crowd[0] / factor**waiting for waiting in reversed(range(len(crowd)))]
            crowd = []
    return ends


def _panel(axis: Any, run: Run, memory: str, quantity: str) -> None:
    for backend in run.backends():
        curve = points(run, memory, backend)
        if curve:
            xs, ys = [each.size for each in curve], [getattr(each, quantity) for each in curve]
            axis.plot(
                xs, ys, mark(backend)[0] + "-", color=colour(backend), linewidth=width(backend), ms=4, label=backend
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks(run), [show(size) for size in ticks(run)], rotation=30, ha="right")
    axis.xaxis.set_minor_locator(_no_ticks())
    axis.grid(True, which="major", alpha=0.35)
    axis.grid(True, which="minor", axis="y", alpha=0.12)
    axis.yaxis.set_major_formatter("{x:g}")
    rising = quantity == "time_us"  # the names go to the end of the panel that the curves leave free
    found = crossovers(competing(times_of(run, memory)))
    for crossing, place in zip(found, apart([each.nbytes for each in found], LABEL_WIDTH, run), strict=True):
        axis.axvline(crossing.nbytes, color="#888888", linestyle=":", linewidth=1.2)
        axis.annotate(
            f"{crossing.before} → {crossing.after}, {show(crossing.nbytes)}",
            (place, 0.98 if rising else 0.02),
            xycoords=("data", "axes fraction"),
            fontsize=7.5,
            rotation=90,
            ha="right",
            va="top" if rising else "bottom",
            color="#555555",
            parse_math=False,
        )


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
