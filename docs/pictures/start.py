"""Draws the pictures of docs/start into docs/pictures: what data-parallel training is, which API to use, the speed-up.

python docs/pictures/start.py        (needs matplotlib: the extra "bench")

The measured points of the speed-up are in docs/pictures/speedup.jsonl, one run a line, written by
sudo bash scripts/cluster_sim.sh HOSTS 1gbit -- python docs/programs/speedup.py --allreduce NAME --json FILE
The lines are those of the cost formulas (allreduce.transport.cost), with the constants that it has without a fit.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from allreduce.transport.cost import Layout, Machine, on_link  # noqa: E402
from benchmarks.predicting.costs import predict  # noqa: E402
from benchmarks.predicting.forecast import MODELS, forecast  # noqa: E402

Point = tuple[float, float]  # in inches
YELLOW, GREEN, BLUE, GREY = "#f3e3bf", "#d6e6cf", "#cfdff0", "#ececec"
EDGE = "#555555"
AUTO, NATIVE, SECOND, IDEAL = "#0b6e99", "#c44e16", "#7a4fa3", "#888888"
LATENCY = 50e-6  # of a message between simulated hosts, in seconds


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes,
    at: tuple[float, float],
    size: tuple[float, float],
    text: str,
    colour: str,
    small: float = 9.5,
    **style: object,
) -> None:
    """Draw a box whose lower left corner is `at`, with text in its middle; a second line is smaller."""
    (x, y), (width, height) = at, size
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(at, width, height, boxstyle=shape, fc=colour, ec=EDGE, lw=1))
    title, _, rest = text.partition("\n")
    shift = 0.12 if rest else 0
    axes.text(x + width / 2, y + height / 2 + shift, title, ha="center", va="center", **{"fontsize": 10.5, **style})
    if rest:
        axes.text(x + width / 2, y + height / 2 - 0.14, rest, fontsize=small, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": EDGE, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    )


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def overview() -> None:
    """Four ranks in columns: rows, replica, gradients; one box across all: the all-reduce; the update."""
    figure, axes = canvas(9.1, 4.9)
    column, width, gap = 2.2, 1.9, 0.3
    for rank in range(4):
        x = gap + rank * column
        axes.text(x + width / 2, 4.66, f"rank {rank}", fontsize=11, weight="bold", ha="center", va="center")
        box(axes, (x, 3.85), (width, 0.6), f"rows {rank * 25} to {rank * 25 + 24}\nof a batch of 100", YELLOW)
        box(axes, (x, 2.9), (width, 0.6), "replica of the model\nforward and backward", GREEN)
        box(axes, (x, 0.2), (width, 0.6), "replica of the model\nthe same update", GREEN)
        for high, low in ((3.85, 3.5), (2.9, 2.45), (1.25, 0.8)):
            arrow(axes, (x + width / 2, high), (x + width / 2, low))
    box(axes, (gap, 1.25), (3 * column + width, 1.2), "", BLUE)
    middle = gap + (3 * column + width) / 2
    axes.text(middle, 2.05, "allreduce: average the gradients of all ranks, in place", fontsize=12, weight="bold",
              ha="center", va="center")  # fmt: skip
    axes.text(middle, 1.63, "shared memory inside a node; a ring or halves across nodes; or MPI, or NCCL. "
              "All ranks get the same bits.", fontsize=9.5, ha="center", va="center")  # fmt: skip
    save(figure, "overview")


CHOICES = {
    "a script for\none process": [
        ("PyTorch, with a loop of its own", "MirroredOptimizer"),
        ("Keras: model.fit", "trainers.keras"),
        ("JAX: a step inside of jit", "allreduce.jax"),
        ("NumPy or CuPy arrays", "allreduce.create"),
    ],
    "a script for\nseveral processes": [
        ("DDP, FSDP, Lightning, Accelerate, Transformers", 'backend "allreduce"'),
        ("Horovod", "trainers.horovod"),
        ("mpi4py: Allreduce", "allreduce.create"),
    ],
    "a model,\nand no loop": [
        ("NumPy, PyTorch, JAX or Keras", "MirroredTrainer"),
        ("data in a file, and no program", "python -m trainers"),
    ],
}


def choose() -> None:
    """The decision tree: what you have, in which framework, and the API for it."""
    height, rows = 0.62, sum(len(each) for each in CHOICES.values())
    total = rows * height + 0.75
    figure, axes = canvas(10.2, total)
    for x, title in ((1.0, "You have"), (4.75, "in"), (8.65, "Use")):
        axes.text(x, total - 0.3, title, fontsize=12, weight="bold", ha="center", va="center")
    y = total - 0.6
    for have, leaves in CHOICES.items():
        middle = y - len(leaves) * height / 2
        box(axes, (0.15, middle - 0.36), (1.75, 0.72), have, YELLOW, small=10.5)
        for number, (framework, use) in enumerate(leaves):
            centre = y - (number + 0.5) * height
            box(axes, (2.75, centre - 0.22), (4.0, 0.44), framework, GREY)
            box(axes, (7.25, centre - 0.22), (2.8, 0.44), use, BLUE, weight="bold")
            arrow(axes, (1.9, middle), (2.75, centre))
            arrow(axes, (6.75, centre), (7.25, centre))
        y -= len(leaves) * height
        if y > 0.3:
            axes.plot((0.15, 10.05), (y, y), color="#bbbbbb", lw=0.8, ls=":")
    save(figure, "choose")


def measured() -> dict[tuple[str, tuple[int, int]], list[float]]:
    """Return (backend, (ranks, nodes)) -> the step of each run, in seconds."""
    found: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for line in (FOLDER / "speedup.jsonl").read_text().splitlines():
        run = json.loads(line)
        found.setdefault((run["allreduce"], (run["ranks"], run["nodes"])), []).append(run["step"])
    return found


def speedup() -> None:
    """Left: measured on simulated hosts, with the cost model's lines. Right: the model alone, on a larger machine."""
    figure = Figure(figsize=(10.2, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    _measured_panel(left)
    _predicted_panel(right)
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.grid(color="#e4e4e4", lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    left.set_ylabel("times as fast as one rank")
    save(figure, "speedup")


def _measured_panel(axes: Axes) -> None:
    runs = [json.loads(line) for line in (FOLDER / "speedup.jsonl").read_text().splitlines()]
    parameters, pause = runs[0]["parameters"], runs[0]["pause"]
    machine = on_link(Machine(), 1e9 / 8, LATENCY)
    counts = range(1, 9)
    axes.plot(counts, counts, color=IDEAL, ls=":", lw=1.4, label="ideal")
    line = [n * pause / (pause + predict("ring", machine, Layout((1,) * n), parameters * 4)) for n in counts[1:]]
    axes.plot(counts, [1, *line], color=AUTO, lw=1.4, label='"auto", predicted by the cost model')
    for name, label, colour, mark in (("auto", '"auto"', AUTO, "o"), ("native", "MPI_Allreduce", NATIVE, "s")):
        points = [(n, n * pause / median(steps)) for (each, (n, nodes)), steps in measured().items()
                  if each == name and n == nodes]  # fmt: skip
        axes.plot(
            *zip(*sorted(points), strict=True), color=colour, ls="", marker=mark, ms=7, label=f"{label}, measured"
        )
    axes.set_title(
        "Measured: simulated hosts, 1 rank each,\n1 Gb/s; 20 MB of gradients, 1 s of computation", fontsize=10.5
    )
    axes.set_xticks([1, 2, 4, 8])


def _predicted_panel(axes: Axes) -> None:
    machine = on_link(Machine(), 25e9 / 8, 5e-6)
    counts = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    axes.plot(counts, counts, color=IDEAL, ls=":", lw=1.4, label="ideal")
    for name, colour in (("resnet50", AUTO), ("bert-base", SECOND)):
        model = replace(MODELS[name], step_seconds=1.0)
        found = forecast(model, machine, 8, counts=counts, overlap=0)
        label = f"{model.title}: {found.gradient_bytes / 1e6:.0f} MB of gradients"
        axes.plot(counts, [row.speedup for row in found.rows], color=colour, lw=1.8, label=label)
    axes.set_title("Predicted, not measured: nodes of 8 ranks, 25 Gb/s,\n1 s of computation, no overlap", fontsize=10.5)
    axes.set_xticks([1, 8, 16, 32, 48, 64])


def main() -> None:
    """Draw all three. The same data give the same files, byte for byte."""
    mpl.rcParams.update({"svg.hashsalt": "allreduce", "svg.fonttype": "none", "font.family": "sans-serif"})
    overview()
    choose()
    speedup()


if __name__ == "__main__":
    main()
