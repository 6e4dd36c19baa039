"""PartMembers: the members of an ensemble that the ranks of one part train, one after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.elastic.ranks import chunk, everywhere, lost, together
from allreduce.topology import Topology
from trainers.apps.ensemble.model import ROWS, averaged, member_votes
from trainers.apps.ensemble.voting import Voting
from trainers.data import Tree, cut, sliced
from trainers.fit.evaluation import evaluate_rows
from trainers.fit.source import Rows
from trainers.mirrored import MirroredTrainer
from trainers.options.loader import Loader
from trainers.replica import Replica
from trainers.watching.history import History

Callbacks = Sequence[Any] | Callable[[int], Sequence[Any]]


class PartMembers:
    """The members that this rank's part trains.

    topology: of the part; it has fewer ranks after a failure. replicas: of the members, also of missing ones, by their
    numbers. options: of the MirroredTrainer of each member.
    """

    def __init__(self, topology: Topology, replicas: dict[int, Replica], options: Mapping[str, Any]) -> None:
        self.topology, self.replicas = topology, replicas
        self._options = dict(options)

    def train(
        self, number: int, rows: Callable[[], Loader], callbacks: Callbacks, settings: dict[str, Any]
    ) -> tuple[History, Exception | None]:
        """Train a member on the ranks of the part; returns its history, and the error that ended its training.
        Collective over the part. Raises errors that not all of these ranks have.

        rows: returns the member's rows. settings: the other arguments of its fit.
        """
        part, trainer, history = self.topology, None, History()
        try:
            data = together(part.world, rows)
            watching = together(part.world, lambda: list(callbacks(number) if callable(callbacks) else callbacks))
            trainer = MirroredTrainer(self.replicas[number], topology=part, **self._options)
            try:
                history = trainer.fit(data, **{**settings, "callbacks": [*watching, history]})
            except Exception as error:
                self._follow(trainer)
                if trainer.group.all_raise(error):
                    trainer.close()
                raise
            self._follow(trainer)
            trainer.close()
        except Exception as error:
            ranks = part if trainer is None else trainer.topology
            if lost(error) is not None:
                self._continue_without_lost(trainer)
            elif not everywhere(error, ranks.world):
                raise
            return history, error
        return history, None

    def _follow(self, trainer: MirroredTrainer | None) -> None:
        """Use the trainer's ranks for the next member: fewer ones, if its trainer has continued after a failure."""
        if trainer is not None and trainer.topology is not self.topology:
            self.topology, trainer.recovery.owns_topology = trainer.topology, False

    def _continue_without_lost(self, trainer: MirroredTrainer | None) -> None:
        """After a failure that has ended a member's training: continue with the ranks of the part that are left.
        Collective over these."""
        before = self.topology
        self._follow(trainer)
        if trainer is not None:
            trainer.abandon()
        if self.topology is before:
            self.topology = before.survivors(admit=False)

    # Local computations

    def votes(
        self, x: Tree, wanted: Mapping[int, np.ndarray], voting: Voting
    ) -> Iterator[tuple[int, np.ndarray, Tree]]:
        """Yield this rank's share of the votes: the number of a member, the numbers of some rows, its votes for them.
        Local. wanted: the rows for which a member votes; the ranks of its part divide them."""
        size, rank = self.topology.size, self.topology.rank
        for number in sorted(self.replicas.keys() & wanted.keys()):
            replica, mine = self.replicas[number], wanted[number][chunk(len(wanted[number]), size, rank)]
            with averaged(replica), np.errstate(all="ignore"):  # the outputs show it if a model has diverged
                for each in cut(mine, len(mine), ROWS) or [mine]:
                    yield number, each, member_votes(replica, sliced(x, each), voting)

    def metrics(self, numbers: Sequence[int], rows: Rows) -> list[tuple[int, list[str], bool, list[float]]]:
        """Return the metrics of members, as (number, names, Replica.counts, sums of evaluate_rows over this rank's
        share of the rows). Local."""
        found = []
        for number in numbers:
            if (replica := self.replicas.get(number)) is not None:
                with averaged(replica), np.errstate(all="ignore"):
                    terms = evaluate_rows(replica, rows, self.topology.size, self.topology.rank)
                found.append((number, list(replica.metrics), replica.counts, terms.sum(axis=0).tolist()))
        return found
