"""Draws the pictures of the documentation into docs/pictures.

python docs/pictures        (needs this library, and nothing else)

An .svg file is one picture. An .html file is a row of small pictures, which wraps on a narrow screen. Pages inline
both, so that their colours follow the theme:

    ```{raw} html
    :file: ../pictures/ring.html
    ```
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from algorithms import ALGORITHMS, RANKS, draw_frame
from diagrams import (
    CALL,
    STEP,
    draw_backups,
    draw_failure,
    draw_fingerprints,
    draw_layers,
    draw_training_step,
    overlap,
    sharded,
    strategies,
)
from svg import save_row


def main() -> None:
    """Draw all pictures. The same data gives the same files, byte for byte."""
    for name, frames in ALGORITHMS.items():
        steps = frames()
        assert all(len(ranks) == RANKS for row in steps[-1].state for ranks in row), name
        save_row(name, f"{name} on 4 ranks, step by step", [draw_frame(frame) for frame in steps])
    draw_layers(CALL, "From reduce(grads) to MPI").save("call")
    draw_layers(STEP, "From fit to the update").save("step")
    draw_training_step().save("training_step")
    save_row("overlap", "A step with and without overlap", overlap())
    draw_fingerprints().save("fingerprints")
    draw_failure().save("failure")
    save_row("sharded", "The arrays of each rank, replicated and sharded", sharded())
    draw_backups().save("backups")
    save_row("strategies", "The four strategies", strategies())


if __name__ == "__main__":
    main()
