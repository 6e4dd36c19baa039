"""Which parts of an asynchronous epoch were served, so that it can be gone on with when a worker was lost."""

import numpy as np
from mpi4py import MPI

from allreduce.messages.agreement import all_values, combine
from trainers.serving.staleness import Counts

HOW_FAR = "hear how far the servers are"


class Parts:
    """The epoch that is under way.

    done: (parts,) bool, those that this server has had; empty on workers. dealt: those that all servers have had when
    the epoch began or was gone on with, which nobody needs to compute. counts: what is told of the epoch.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.done = self.dealt = np.zeros(0, bool)
        self.counts = Counts()

    def begin(self, epoch: int, parts: int) -> None:
        """An epoch of so many parts begins here, or is gone on with. parts: none on workers. Local."""
        if self.epoch != epoch:
            self.epoch, self.counts = epoch, Counts()
            self.done = np.zeros(0, bool)
        if self.done.size != parts:
            self.done, self.dealt = np.zeros(parts, bool), np.zeros(parts, bool)

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """Parts that any server lacks are to be dealt again. Collective. serves: whether this rank is a server."""
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.done.size if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, parts if serves else 0)
        self.dealt = combine(comm, self.done.copy() if serves else np.ones(parts, bool), HOW_FAR, MPI.LAND)
