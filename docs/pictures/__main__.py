"""Draws the pictures of the documentation into docs/pictures.

python docs/pictures [FOLDER]    (needs this library, and nothing else)

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


def main(folder: Path) -> None:
    """Draw all pictures into a folder. The same data gives the same files, byte for byte."""
    for name, frames in ALGORITHMS.items():
        steps = frames()
        assert all(len(ranks) == RANKS for row in steps[-1].state for ranks in row), name
        save_row(folder / name, f"{name} on 4 ranks, step by step", [draw_frame(frame) for frame in steps])
    draw_layers(CALL, "From reduce(grads) to MPI").save(folder / "call")
    draw_layers(STEP, "From fit to the update").save(folder / "step")
    draw_training_step().save(folder / "training_step")
    save_row(folder / "overlap", "A step with and without overlap", overlap())
    draw_fingerprints().save(folder / "fingerprints")
    draw_failure().save(folder / "failure")
    save_row(folder / "sharded", "The arrays of each rank, replicated and sharded", sharded())
    draw_backups().save(folder / "backups")
    save_row(folder / "strategies", "The four strategies", strategies())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
