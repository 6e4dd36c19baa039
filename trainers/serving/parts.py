"""What has become of the parts of an epoch, so that the others go on with it when a worker was lost."""

import numpy as np
from mpi4py import MPI

from allreduce.messages.agreement import all_values, combine
from trainers.serving.staleness import Counts

HOW_FAR = "hear how far the servers are"
LEFT, NOTHING, DROPPED = -1, -2, -3  # what has become of a part, besides the staleness of gradients that were applied


class Parts:
    """The epoch that is under way: parts of batches that are dealt, or steps that all take together.

    outcomes: (parts,): what has become of every part in this server's slice; empty on workers.
    dealt: (parts,) bool, those that all servers have had when the epoch began or was gone on with, which nobody needs
        to compute. cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self) -> None:
        self.epoch, self.cut_short = -1, False
        self._begin_anew(0)

    def begin(self, epoch: int, parts: int) -> None:
        """An epoch of so many parts begins here, or is gone on with. Local."""
        if self.epoch != epoch or self.parts != parts:
            self.epoch, self.cut_short = epoch, False
            self._begin_anew(parts)

    def _begin_anew(self, parts: int) -> None:
        self.outcomes = np.full(parts, LEFT, np.int32)
        self.dealt = np.zeros(parts, bool)

    @property
    def parts(self) -> int:
        return self.outcomes.size

    def has(self, number: int) -> bool:
        """Whether this server had a part."""
        return bool(self.outcomes[number] != LEFT)

    def note(self, number: int, outcome: int) -> None:
        """This server had a part; what became of it the first time counts."""
        if not self.has(number):
            self.outcomes[number] = outcome

    def counts(self) -> Counts:
        """What is told of the epoch."""
        counts = Counts()
        counts.behind = np.bincount(self.outcomes[self.outcomes >= 0]).tolist()
        counts.dropped = int((self.outcomes == DROPPED).sum())
        counts.cut_short = self.cut_short
        return counts

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """Parts that any server lacks are to be dealt again. Collective. serves: whether this rank is a server."""
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, parts if serves else 0)
        done = self.outcomes != LEFT if serves else np.ones(parts, bool)
        self.dealt = combine(comm, done, HOW_FAR, MPI.LAND)
