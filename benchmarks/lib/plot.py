"""The picture of a run: busbw and time over size, for allocated and foreign arrays. Needs matplotlib.

Each backend has a colour and a mark, the same in every picture and page. Dotted lines: where another backend becomes
the fastest, which the title names. Dashed: the limit of memory or network.
"""

import io
import math
import textwrap
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.advice import competing, in_words, ranges, times_of
from benchmarks.lib.limits import limit_of
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
_MARKS = ("o", "s", "^", "D", "v")


def colour(backend: str) -> str:
    """The colour of a backend, the same in every run."""
    return COLOURS.get(backend) or _SPARE[zlib.crc32(backend.encode()) % len(_SPARE)]


def mark(backend: str) -> str:
    """Return the backend's mark, for readers who can't tell the colours apart."""
    known = list(COLOURS)
    index = known.index(backend) if backend in known else zlib.crc32(backend.encode())
    return _MARKS[index % len(_MARKS)]


def dash(backend: str) -> str:
    """Return the backend's line: solid or dashed, so that neighbouring curves can be told apart."""
    return ("-", "--", "-.", ":")[list(COLOURS).index(backend) % 4 if backend in COLOURS else 1]


def width(backend: str) -> float:
    """Return the line width; native and auto are thicker."""
    return 2.6 if backend in ("native", "auto") else 1.8


TITLE_WIDTH = 90  # characters above a panel
ROWS = (("busbw", "bus bandwidth (GB/s)"), ("time_us", "time (us)"))


def missing(option: str, path: str) -> str | None:
    """Return why an option can't draw a picture to this path, or a page with pictures; or None."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        return f'{option} needs matplotlib, which can\'t be imported ({error}); pip install ".[bench]" in the checkout'
    fits = option == "--html" or kind_of(path) in FigureCanvasAgg.get_supported_filetypes()
    return None if fits else f"{option} {path}: a name that ends in .png, .svg or .pdf is needed"


def kind_of(path: str) -> str:
    """Return the kind of picture in a file of this name, such as "png"."""
    return Path(path).suffix.lstrip(".").lower()


def content(figure: Any, kind: str) -> bytes:
    """Return a matplotlib Figure as the content of a file of this kind."""
    found = io.BytesIO()
    figure.savefig(found, format=kind, dpi=110)
    return found.getvalue()


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
            fastest = in_words(ranges(competing(times_of(run, memory)))) if len(run.backends()) > 1 else ""
            title = "\n".join([TITLES[memory], *textwrap.wrap(fastest, TITLE_WIDTH)])
            axes[line][column].set_title(title if line == 0 or caches else "", fontsize=10, parse_math=False)
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


def _panel(axis: Any, run: Run, memory: str, quantity: str) -> None:
    from matplotlib.ticker import NullLocator

    for backend in run.backends():
        curve = points(run, memory, backend)
        if curve:
            xs, ys = [each.size for each in curve], [getattr(each, quantity) for each in curve]
            style = {"marker": mark(backend), "linestyle": dash(backend), "linewidth": width(backend), "ms": 5}
            axis.plot(xs, ys, color=colour(backend), label=backend, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks(run), [show(size) for size in ticks(run)], rotation=30, ha="right")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True, which="major", alpha=0.35)
    axis.grid(True, which="minor", axis="y", alpha=0.12)
    axis.yaxis.set_major_formatter("{x:g}")
    for before, after in pairwise(ranges(competing(times_of(run, memory)))):
        axis.axvline(math.sqrt(before.last * after.first), color="#888888", linestyle=":", linewidth=1.2)
    limit = limit_of(run) if quantity == "busbw" else None
    if limit:
        axis.axhline(limit.busbw, color="#111111", linestyle="--", linewidth=1.2, label=f"limit of the {limit.what}")
