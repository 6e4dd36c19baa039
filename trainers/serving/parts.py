"""What has become of the parts of an epoch, so that it can be gone on with when a rank was lost."""

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from allreduce.messages.agreement import all_values, combine
from trainers.serving.staleness import Counts

HOW_FAR = "hear how far the servers are"
LEFT, NOTHING, DROPPED = -1, -2, -3  # what has become of a part, besides the staleness of gradients that were applied
NONE = slice(0, 0)  # of the parameters: what a worker updates


class Parts:
    """The epoch that is under way: parts of batches that are dealt, or steps that all take together.

    fit: its number; an epoch of another fit is another one.
    bounds, outcomes: (ranges + 1,) and (ranges, parts): what has become of every part in each range of this server's
        slice, between two bounds; none on workers. There is one range, until a server has taken over from others that
        had not come as far as it had.
    dealt: (parts,) bool, those that all servers have had when the epoch began or was gone on with, which nobody needs
        to compute. cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self, fit: int = 0, part: slice = NONE) -> None:
        self.fit, self.epoch = fit, -1
        self.cut_short = False
        self._begin_anew(0, part)

    def begin(self, epoch: int, parts: int, part: slice = NONE) -> None:
        """An epoch of so many parts begins here, or is gone on with. Local. part: this server's slice."""
        if self.epoch != epoch or self.outcomes.shape[1] != parts:
            self.epoch, self.cut_short = epoch, False
            self._begin_anew(parts, part)

    def _begin_anew(self, parts: int, part: slice) -> None:
        self.bounds = np.array([part.start, part.stop], np.int64)
        self.outcomes = np.full((1, parts), LEFT, np.int32)
        self.dealt = np.zeros(parts, bool)

    @property
    def parts(self) -> int:
        return int(self.outcomes.shape[1])

    @property
    def done(self) -> np.ndarray:
        """(parts,) bool: those that this server has had in all its ranges."""
        return (self.outcomes != LEFT).all(axis=0)

    def has(self, number: int) -> bool:
        """Whether a part was had in all ranges."""
        return bool((self.outcomes[:, number] != LEFT).all())

    def lacking(self, number: int) -> list[slice]:
        """The ranges in which a part was not had, when there are others; none when all lack it."""
        if len(self.outcomes) == 1:
            return []
        lack = self.outcomes[:, number] == LEFT
        return [] if lack.all() else [slice(*self.bounds[place : place + 2]) for place in np.flatnonzero(lack)]

    def note(self, number: int, outcome: int) -> None:
        """A part was had, where it was not before."""
        column = self.outcomes[:, number]
        column[column == LEFT] = outcome

    def counts(self) -> Counts:
        """What is told of the epoch."""
        counts, first = Counts(), self.outcomes[0]
        counts.behind = np.bincount(first[first >= 0]).tolist()
        counts.dropped = int((first == DROPPED).sum())
        counts.cut_short = self.cut_short
        return counts

    def agree(self, comm: MPI.Intracomm, serves: bool, part: slice) -> None:
        """Parts that any server lacks are to be dealt again. Collective. serves: whether this rank is a server."""
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, parts if serves else 0, part)
        self.dealt = combine(comm, self.done if serves else np.ones(parts, bool), HOW_FAR, MPI.LAND)


def joined(slices: Sequence[Parts]) -> Parts:
    """The epoch of servers whose slices lie one behind the other: the newest; who is not in it has had no part."""
    fit, epoch = newest = max((one.fit, one.epoch) for one in slices)
    within = [one for one in slices if (one.fit, one.epoch) == newest]
    whole, parts = Parts(fit), max(one.parts for one in within)
    whole.epoch, whole.cut_short = epoch, any(one.cut_short for one in within)
    bounds, rows = [int(slices[0].bounds[0])], []  # type: list[int], list[np.ndarray]
    for one in slices:
        begun = one
        if one not in within or one.parts != parts:
            begun = Parts()
            begun.begin(epoch, parts, slice(*one.bounds[[0, -1]].tolist()))
        for stop, row in zip(begun.bounds[1:].tolist(), begun.outcomes, strict=True):
            if rows and np.array_equal(rows[-1] == LEFT, row == LEFT):
                bounds[-1] = stop  # they are equally far
            else:
                bounds.append(stop)
                rows.append(row)
    whole.bounds, whole.outcomes = np.array(bounds, np.int64), np.array(rows, np.int32).reshape(len(rows), parts)
    whole.dealt = whole.done
    return whole


def cut(whole: Parts, part: slice) -> Parts:
    """What of an epoch is of one server's slice; a worker, which has none, only knows what needs no computing."""
    own = Parts(whole.fit, part)
    own.epoch, own.cut_short, own.dealt = whole.epoch, whole.cut_short, whole.dealt
    if part == NONE:
        return own
    inner = [bound for bound in whole.bounds.tolist() if part.start < bound < part.stop]
    own.bounds = np.array([part.start, *inner, part.stop], np.int64)
    rows = np.searchsorted(whole.bounds[1:-1], own.bounds[:-1], side="right")
    own.outcomes = whole.outcomes[rows]
    return own
