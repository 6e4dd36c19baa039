"""New ranks in the places of lost ones: started after an epoch, they come in after the one in which they are ready."""

import logging
from typing import TYPE_CHECKING, Any

from allreduce.errors import RankLostError, UnavailableError
from allreduce.newcomers import Newcomers
from allreduce.topology import Topology

if TYPE_CHECKING:
    from trainers.base import Trainer

log = logging.getLogger("trainers")

made: list[int] = []  # an entry for each trainer that has been made with places to fill; those that are closed too


class RenewedError(RankLostError):
    """Nobody was lost: a call is made again with ranks that join."""


class Renewal:
    """The places of a trainer's ranks. places: how many there were in the beginning; the same on all ranks.

    told: what new ranks hear when they begin, of calls that were made before.
    """

    def __init__(self, trainer: "Trainer", places: int, told: list[list[Any]]) -> None:
        self._trainer, self.places, self._told = trainer, places, told
        self._newcomers: Newcomers | None = None
        self._given_up = False
        self.comes = False  # those that were started are to join now

    @property
    def wanted(self) -> bool:
        """Whether there is a place to fill. Local, the same on all ranks."""
        return self._trainer.topology.size < self.places and not self._given_up

    def look(self) -> None:
        """Start ranks, or see whether those that were started are to join now. Collective.

        Raises UnavailableError on all ranks when none can be started; RankLostError.
        """
        topology = self._trainer.topology
        if self._newcomers is not None:
            self.comes = self._newcomers.ready(topology)
            return
        missing = self.places - topology.size
        self._newcomers = Newcomers(topology, missing, self._told)
        if topology.rank == 0:
            what = "a new rank was" if missing == 1 else f"{missing} new ranks were"
            log.warning("trainers: %s started, to join after a coming epoch", what)

    def join(self, topology: Topology) -> Topology:
        """The ranks of `topology` and those that were started. Collective over both."""
        newcomers, self._newcomers, self.comes = self._newcomers, None, False
        assert newcomers is not None
        return newcomers.join(topology)

    def give_up(self, error: UnavailableError) -> None:
        """Start no more. Local, on all ranks."""
        self.let_go()
        self._given_up = True
        if self._trainer.rank == 0:
            log.warning("trainers: the training goes on without new ranks: %s", error)

    def let_go(self) -> None:
        """Those that were started, and have not joined, are not needed. Local, on all ranks."""
        newcomers, self._newcomers, self.comes = self._newcomers, None, False
        if newcomers is not None:
            newcomers.let_go()
