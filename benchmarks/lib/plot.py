"""The picture of a run: busbw and time over size, for allocated and foreign arrays. Needs matplotlib.

Each backend has a colour and a mark, the same in every picture and page.
"""

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.advice import Crossover, competing, crossovers, times_of
from benchmarks.lib.results import COLD, MEMORIES, TITLES, Result, Run
from benchmarks.lib.sizes import show

COLOURS = {
    "native": "#4d4d4d",
    "shared": "#d62728",
    "ring": "#1f77b4",
    "hierarchical_copy": "#2ca02c",
    "halving_doubling": "#9467bd",
    "reduce_to_one": "#a0662f",
    "auto": "#ff8c00",
    "nccl": "#76b900",
    "gloo": "#e377c2",
    "mpi4py": "#9a9a9a",
    "openmpi": "#17becf",
    "deepspeed": "#003f5c",
    "mlx": "#bcbd22",
}
_SPARE = ("#7a5195", "#ef5675", "#008080")
# matplotlib's mark, plotly's mark
_MARKS = (("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"))


def colour(backend: str) -> str:
    """The colour of a backend, the same in every run."""
    return COLOURS.get(backend) or _SPARE[zlib.crc32(backend.encode()) % len(_SPARE)]


def mark(backend: str) -> tuple[str, str]:
    """Return the backend's mark in matplotlib and in plotly, for readers who can't tell the colours apart."""
    known = list(COLOURS)
    index = known.index(backend) if backend in known else zlib.crc32(backend.encode())
    return _MARKS[index % len(_MARKS)]


def dash(backend: str) -> str:
    """Return the backend's line in matplotlib: solid or dashed, so that neighbouring curves can be told apart."""
    return ("-", "--", "-.", ":")[list(COLOURS).index(backend) % 4 if backend in COLOURS else 1]


def width(backend: str) -> float:
    """Return the line width; native and auto are thicker."""
    return 2.6 if backend in ("native", "auto") else 1.8


NUMBER_WIDTH = 0.02  # of a panel's width
TITLE_WIDTH = 90  # characters above a panel
ROWS = (("busbw", "bus bandwidth (GB/s)"), ("time_us", "time (us)"))


def missing(path: str) -> str | None:
    """Return why no picture can be drawn to this path, or None."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        return f'--plot needs matplotlib, which can\'t be imported ({error}); pip install ".[bench]" in the checkout'
    known = FigureCanvasAgg.get_supported_filetypes()
    return None if kind_of(path) in known else f"--plot {path}: a name that ends in .png, .svg or .pdf is needed"


def kind_of(path: str) -> str:
    """Return the kind of picture in a file of this name, such as "png"."""
    return Path(path).suffix.lstrip(".").lower()


def content(figure: Any, kind: str) -> bytes:
    """Return a matplotlib Figure as the content of a file of this kind."""
    found = io.BytesIO()
    figure.savefig(found, format=kind, dpi=110)
    return found.getvalue()


def bars(axis: Any, names: Sequence[str], values: Sequence[float], texts: Sequence[str], **style: Any) -> None:
    """Draw horizontal bars with texts at their ends. style: of barh; with y the places among `names`."""
    drawn = axis.barh(style.pop("y", range(len(names))), values, **{"height": 0.7, **style})
    axis.bar_label(drawn, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.margins(x=0.2)
    axis.set_axisbelow(True)
    axis.grid(True, axis="x", alpha=0.3)


def draw(run: Run, kind: str = "png") -> bytes:
    """Return the picture as the content of a file. kind: "png", "svg" or "pdf"."""
    return content(figure_of(run), kind)


def figure_of(run: Run) -> Any:
    """Return the picture as a matplotlib Figure."""
    from matplotlib.figure import Figure

    memories = [memory for memory in MEMORIES if run.of(memory)]
    rows = [("", *row) for row in (ROWS if run.ranks > 1 else ROWS[1:])]  # busbw of one rank is 0
    if any(each.memory.endswith(COLD) for each in run.results):
        rows = [(caches, *rows[0][1:]) for caches in ("", COLD)]
    figure = Figure(figsize=(6.8 * len(memories) + 0.6, 4.4 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots(len(rows), len(memories), sharex=True, sharey="row", squeeze=False)
    for line, (caches, quantity, label) in enumerate(rows):
        for column, memory in enumerate(memory + caches for memory in memories):
            _panel(axes[line][column], run, memory, quantity)
            title = "\n".join([TITLES[memory], *crossings_in_words(run, memory, TITLE_WIDTH)])
            axes[line][column].set_title(title if line == 0 or caches else "", fontsize=10, pad=16, parse_math=False)
        axes[line][0].set_ylabel(label)
    for last in axes[-1]:
        last.set_xlabel("size")
    machine = run.machine
    figure.suptitle(
        f"AllReduce of {run.dtype} ({run.op}), {run.place()}\n{machine['cpu']}, {machine['cores']} cores, "
        f"{machine['mpi']}, {run.date[:10]}",
        fontsize=12,
        parse_math=False,  # names of machines and files are not formulas
    )
    handles = {handle.get_label(): handle for axis in axes.flat for handle in axis.get_legend_handles_labels()[0]}
    legend = figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=5, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def ticks(run: Run) -> list[int]:
    """Return the sizes to label on an axis: powers of 8 from the smallest to the largest size."""
    sizes = [result.size for result in run.results]
    powers = [8**power for power in range(1, 14)]
    return [power for power in powers if min(sizes) <= power <= max(sizes)] or sorted(set(sizes))


def points(run: Run, memory: str, backend: str) -> list[Result]:
    """Return the results of a backend, sorted by size."""
    return sorted((each for each in run.of(memory) if each.backend == backend), key=lambda each: each.size)


def numbered(run: Run, memory: str, width: float) -> list[tuple[float, Crossover]]:
    """Return (size, crossover) in ascending order. size: where its number is drawn without overlapping another one.

    width: of a number, as a fraction of the (logarithmic) axis.
    """
    sizes = [result.size for result in run.results]
    factor = (max(sizes) / min(sizes)) ** width
    found, free = [], 0.0
    for crossing in crossovers(competing(times_of(run, memory))):
        place = max(crossing.nbytes, free)
        found.append((place, crossing))
        free = place * factor
    return found


def crossings_in_words(run: Run, memory: str, width: int) -> list[str]:
    """Return the crossovers as lines of about `width` characters: "1: native → shared at 32 KiB, ..."."""
    lines: list[str] = []
    for number, each in enumerate(crossovers(competing(times_of(run, memory))), start=1):
        words = f"{number}: {each.before} → {each.after} at {show(each.nbytes)}"
        if lines and len(lines[-1]) + len(words) < width:
            lines[-1] += f",  {words}"
        else:
            lines.append(words)
    return lines


def _panel(axis: Any, run: Run, memory: str, quantity: str) -> None:
    for backend in run.backends():
        curve = points(run, memory, backend)
        if curve:
            xs, ys = [each.size for each in curve], [getattr(each, quantity) for each in curve]
            style = {"marker": mark(backend)[0], "linestyle": dash(backend), "linewidth": width(backend), "ms": 5}
            axis.plot(xs, ys, color=colour(backend), label=backend, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks(run), [show(size) for size in ticks(run)], rotation=30, ha="right")
    axis.xaxis.set_minor_locator(_no_ticks())
    axis.grid(True, which="major", alpha=0.35)
    axis.grid(True, which="minor", axis="y", alpha=0.12)
    axis.yaxis.set_major_formatter("{x:g}")
    for number, (place, crossing) in enumerate(numbered(run, memory, NUMBER_WIDTH), start=1):
        axis.axvline(crossing.nbytes, color="#888888", linestyle=":", linewidth=1.2)
        above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}  # where no curve is
        axis.annotate(str(number), (place, 1.01), fontsize=8, color="#555555", annotation_clip=False, **above)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
