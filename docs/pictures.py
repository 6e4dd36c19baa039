"""Draws the pictures of CONTRIBUTING.md into docs/pictures: the path of a call, and the path of a training step.

python docs/pictures.py        (needs matplotlib: the extra "bench")
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent / "pictures"
WIDTH, HEIGHT, GAP = 9.0, 0.86, 0.34  # of a box and between two, in inches
COLOURS = {"your program": "#f3e3bf", "trainers": "#d6e6cf", "allreduce": "#cfdff0", "MPI": "#e2e2e2"}


class Box(NamedTuple):
    """A layer on the path. house: a key of COLOURS. file: where to read the code; "" for none."""

    house: str
    title: str
    file: str
    text: str


YOURS = "your program"
CALL = [
    Box(YOURS, 'reduce(grads, op="mean")', "", "On every rank. The backend made the memory: reduce.allocate(n)."),
    Box("allreduce", "AllReduce.__call__", "allreduce/backend.py", "Looks up the call's record: dtype, length, op."),
    Box("allreduce", "Engine.prepare", "allreduce/engine/engine.py", "The ranks compare their calls."),
    Box(
        "allreduce", "Ring._reduce", "allreduce/backends/ring.py", "The algorithm, in place. Each backend has its own."
    ),
    Box("allreduce", "Transfer", "allreduce/transport/point_to_point.py", "Sends and receives chunks, and adds them."),
    Box("allreduce", "wait", "allreduce/transport/wait.py", "The stall detector (health/stall.py) sees every wait."),
    Box("MPI", "Isend, Irecv, Test", "", "The messages contain only chunks of the gradients."),
]
STEP = [
    Box(YOURS, "trainer.fit(x, y, epochs=10, batch_size=100)", "", "On every rank, with the same rows."),
    Box("trainers", "Fit", "trainers/fit/loop.py", "Takes this rank's rows of the batch; calls callbacks."),
    Box("trainers", "Mirrored.compute", "trainers/strategies/mirrored.py", "Lets the replica compute the gradients."),
    Box("trainers", "Replica", "trainers/replicas/", "Writes gradients into the buffer of the backend. Uses no MPI."),
    Box(
        "trainers",
        "Mirrored.step",
        "trainers/strategies/mirrored.py",
        "Averages the buffer, then updates the replica.",
    ),
    Box("allreduce", "AllReduce", "allreduce/backend.py", "Averages the buffer in place, as the other picture shows."),
    Box("trainers", "Replica", "trainers/replicas/", "Updates its parameters from the same buffer."),
]


def draw(boxes: list[Box], name: str) -> None:
    """Write docs/pictures/NAME.svg: the boxes, one below the other, with arrows between them."""
    height = len(boxes) * (HEIGHT + GAP)
    figure = Figure(figsize=(WIDTH + 0.2, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH + 0.2), ylim=(0, height))
    axes.axis("off")
    for number, box in enumerate(boxes):
        top = height - GAP / 2 - number * (HEIGHT + GAP)
        draw_box(axes, box, top)
        if number + 1 < len(boxes):
            arrow = {"arrowstyle": "-|>", "color": "#555555", "lw": 1.4}
            axes.annotate("", (0.8, top - HEIGHT - GAP), (0.8, top - HEIGHT), arrowprops=arrow)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def draw_box(axes: Axes, box: Box, top: float) -> None:
    """Draw a box whose upper edge is at `top`: title and file in its first line, text in its second."""
    style = "round,pad=0,rounding_size=0.08"
    outline = FancyBboxPatch((0.1, top - HEIGHT), WIDTH, HEIGHT, boxstyle=style, fc=COLOURS[box.house], ec="#555555")
    axes.add_patch(outline)
    axes.text(0.3, top - 0.3, box.title, fontsize=12, weight="bold", va="center")
    axes.text(WIDTH - 0.1, top - 0.3, box.file or box.house, fontsize=10, family="monospace", va="center", ha="right")
    axes.text(0.3, top - 0.62, box.text, fontsize=10.5, va="center")


def main() -> None:
    """Draw both pictures. The same boxes give the same files, byte for byte."""
    mpl.rcParams.update({"svg.hashsalt": "allreduce", "svg.fonttype": "none"})
    draw(CALL, "call")
    draw(STEP, "step")


if __name__ == "__main__":
    main()
