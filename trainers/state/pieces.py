"""What the ranks that are left have of a training's state, and the newest state that they can put together.

A state belongs to a step: it is what the model has come to after so many. Where every rank updates a slice, ranks may
be a step apart when a loss is heard of, so a rank tells for which steps its pieces are good. No MPI here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
MEASURED = "trainer.measured"  # the name by which the means of a step travel with a state


class Piece(NamedTuple):
    """Elements `start` to `stop` of a state, good for steps `first` to `last`, between which nothing was updated.

    sliced: those elements of arrays that are as long as the state, by name. rest: what has no slices.
    """

    first: int
    last: int
    start: int
    stop: int
    sliced: Arrays
    rest: Arrays


class Choice(NamedTuple):
    """Of which step the newest state is, and who has its pieces, in order: (rank, number of the piece there)."""

    step: int
    pieces: list[tuple[int, int]]


Offer = tuple[int, int, int, int]  # the first numbers of a Piece


def choose(offers: Sequence[Sequence[Offer]], length: int) -> Choice | None:
    """The newest step whose state is there, all `length` elements of it. offers: those of every rank; None for none."""
    steps = {step for rank in offers for first, last, *_ in rank for step in (first, last)}
    for step in sorted(steps, reverse=True):
        pieces = _covering(offers, length, step)
        if pieces is not None:
            return Choice(step, pieces)
    return None


def _covering(offers: Sequence[Sequence[Offer]], length: int, step: int) -> list[tuple[int, int]] | None:
    """Pieces for a step, one behind the other; of equal ones that which its rank has named first."""
    fitting = [
        (start, number, rank, stop)
        for rank, pieces in enumerate(offers)
        for number, (first, last, start, stop) in enumerate(pieces)
        if first <= step <= last and start < stop
    ]
    ways: dict[int, list[tuple[int, int]]] = {0: []}  # where pieces end that lie one behind the other: which they are
    for start, number, rank, stop in sorted(fitting):
        if start in ways and stop not in ways:
            ways[stop] = [*ways[start], (rank, number)]
    return ways.get(length)


def joined(pieces: Sequence[tuple[Arrays, Arrays]]) -> Arrays:
    """The state of these pieces, each `sliced` and `rest`, in order; the rest is the first one's."""
    names = pieces[0][0]
    whole = {name: np.concatenate([sliced[name] for sliced, _ in pieces]) for name in names}
    return {**pieces[0][1], **whole}


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
