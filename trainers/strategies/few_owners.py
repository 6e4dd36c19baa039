"""The strategy in which a few ranks hold the parameters and the optimizer: one rank of central storage, or servers.

These ranks are the owners of a mirrored training: each sums the gradients of its slice and updates the parameters
there; then the other ranks receive them. On one node the parameters are in shared memory, so nothing is sent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from allreduce import create
from allreduce.backend import AllReduce
from allreduce.elastic.standby import JOINED
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks, root_value
from trainers.arguments import is_integer
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.options.average import Sharded
from trainers.replica import Replica
from trainers.strategies.central import Central
from trainers.strategies.interface import outlives_ranks, replica_error
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.servers.options import Options
from trainers.strategies.step import Step, StepOwners


class Storage(NamedTuple):
    """The arguments of a CentralStorageTrainer, which has one owner. Methods are those of Options of the servers."""

    storage: Any
    copies: Any

    @property
    def serve(self) -> bool:
        return False

    def owners(self, ranks: int) -> tuple[int, ...]:
        return (self.storage,)

    def error(self, replica: Replica, ranks: Topology) -> ArgumentError | None:
        storage = self.storage
        if not is_integer(storage, 0, ranks.size - 1):
            return ArgumentError(f"storage must be a rank of this training, 0 to {ranks.size - 1}, got {storage!r}")
        return None


class FewOwners(Mirrored):
    """Mirrored with the backend Central. placement: the trainer's arguments. copies: see Sharded; servers have backups
    wherever the failure of one of them would leave a part of the state alone.

    servers: the owners now.
    """

    def __init__(self, replica: Replica, name: str, placement: Storage | Options, copies: int = 1) -> None:
        super().__init__(replica, name, None, None, Sharded())
        self._placement, self._copies = placement, copies
        self.servers: tuple[int, ...] = ()

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._placement._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def argument_error(self, ranks: Topology) -> Exception | None:
        replica = self.replica
        if error := replica_error(replica, self) or self._placement.error(replica, ranks):
            return error
        if self._placement.serve and replica.device != "cpu":
            return ArgumentError(f"{self.describe()} works on the CPU, and this replica is on {replica.device}")
        return super().argument_error(ranks)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self.replica.device == "cpu"

    @property
    def computing(self) -> tuple[int, ...]:
        """The ranks that compute gradients now."""
        idle = self.servers if self._placement.serve else ()
        return tuple(rank for rank in range(self.group.size) if rank not in idle)

    def connect(self, group: RankGroup) -> None:
        self.servers = self._placement.owners(group.size)
        super().connect(group)

    def follow(self, previous: tuple[int, ...]) -> None:
        self.servers = tuple(rank for rank, old in enumerate(previous) if old in self.servers)

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        """As Strategy.rebuild. The remaining owners own everything. If none remains, rank 0 becomes the storage rank,
        but no worker a server: then RankLostError is raised on all ranks."""
        previous, comm = self.group.previous, self.group.comm
        if JOINED in previous:
            old = next(rank for rank, before in enumerate(previous) if before != JOINED)
            self.servers = tuple(root_value(comm, list(self.servers), "learn the ranks that own the parameters", old))
        if self._placement.serve and not (self.servers and self.computing):
            lost = "workers have failed, and servers do not compute"
            if not self.servers:
                lost = "servers have failed, and the parameters and the optimizer's state are lost"
            raise on_all_ranks(
                RankLostError(f"all {lost}; resume from the last checkpoint (resume=True, --resume)"), comm
            )
        self.servers = self.servers or (0,)
        return super().rebuild(go_back)

    def _make_backend(self) -> AllReduce:
        return create(Central, self.group.topology, roots=self.servers)

    def _make_step(self) -> Step:
        step, rank, computing = super()._make_step(), self.group.rank, self.computing
        self.part, self.parts = computing.index(rank) if rank in computing else None, len(computing)
        step.computes = self.part is not None
        return step

    def _effective_copies(self) -> int:
        if self._placement.serve:
            return 2 if len(self.servers) > 1 and outlives_ranks(self) else 1
        return super()._effective_copies()

    def _divided(self, step: Step) -> StepOwners:
        try:
            return super()._divided(step)
        except ArgumentError as error:  # on all ranks
            text = (
                f'{self.name} updates slices of the parameters, as MirroredTrainer does with update="sharded": {error}'
            )
            raise on_all_ranks(ArgumentError(text), self.group.comm) from error
