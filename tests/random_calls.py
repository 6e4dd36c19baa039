"""The values from which random calls are drawn, and the right results: for tests.sequences, in which all ranks make the
same calls, and tests.faults, in which ranks fail. Pure.
"""

import random
from collections.abc import Callable

import numpy as np

LENGTHS = (0, 1, 2, 3, 5, 16, 17, 1000, 4099, 70_001)
OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "prod": lambda rows: rows.prod(0),
}


def nodes_for(draw: random.Random, ranks: int) -> tuple[int, ...]:
    """Return sizes of simulated nodes; () for one node, which is drawn most often."""
    if ranks == 1:
        return ()
    halves = ranks - ranks // 2, ranks // 2
    return draw.choice(((), (), (), halves, halves[::-1], (1,) * ranks))
