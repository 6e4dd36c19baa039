"""One call of fit: its epochs, its callbacks and its checkpoints."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    pass


class Begun(NamedTuple):
    """What of an epoch a checkpoint has: its steps, the seconds that they took, the values that they gave.

    rows: that a checkpoint had, when other ranks have trained since, whom this one joins.
    """

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    measured: np.ndarray = np.empty((0, 0))
    rows: int | None = None


class Place(NamedTuple):
    """How far a fit is: `step` steps of an epoch are done, and of what follows them the parts before `stage`.

    epoch: -1 before the training has begun; the number of epochs when it ends.
    """

    epoch: int = -1
    step: int = 0
    stage: int = 0


STEPS, EVALUATION, EVENTS, SAVE = range(4)  # the stages of an epoch
