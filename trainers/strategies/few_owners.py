"""The strategy in which a few ranks hold the parameters and the optimizer: one rank of central storage, or servers.

These ranks are the owners of a mirrored training: each sums the gradients of its slice and updates the parameters
there; then the other ranks receive them. On one node the parameters are in shared memory, so nothing is sent. Where one
rank owns everything, and a replica's parameters can't be moved into the trainer's memory, the other ranks receive a
copy of the whole state instead.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from allreduce import create, notices
from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.elastic.standby import JOINED
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport.control import on_all_ranks, root_value, together
from trainers.errors import ArgumentError
from trainers.group import RankGroup, broadcast_arrays
from trainers.options.average import Sharded
from trainers.replica import Replica
from trainers.stopwatch import COMMUNICATION
from trainers.strategies.central import Central
from trainers.strategies.interface import outlives_ranks, replica_error
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.step import ReducedStep, StepOwners

NORM = "trainer.norm"  # in a broadcast state: the norm of the gradients


class Placement(Protocol):
    """The arguments of a trainer that say which ranks own the parameters: a NamedTuple, which messages show.

    serve: whether the owners compute no gradients.
    """

    @property
    def serve(self) -> bool: ...

    def owners(self, ranks: int) -> tuple[int, ...]:
        """Return the owners of `ranks` ranks, in order. Local."""

    def error(self, replica: Replica, ranks: Topology) -> ArgumentError | None:
        """Return the error if the arguments are invalid with this replica on these ranks, or None. Local."""

    def renumbered(self, previous: tuple[int, ...]) -> "Placement":
        """Return the arguments after a failure, before any training. previous: see Strategy.renumber. Local."""

    def _asdict(self) -> dict[str, Any]: ...


class FewOwners(Mirrored):
    """Mirrored with the backend Central. placement: the trainer's arguments. copies: see Sharded; None for backups
    wherever the failure of one owner would leave a part of the state alone.

    servers: the owners now.
    """

    def __init__(self, replica: Replica, name: str, placement: Placement, copies: int | None = None) -> None:
        super().__init__(replica, name, None, None, Sharded())
        self._placement, self._backs_up = placement, copies is None
        self._copies = copies or 1
        self.servers: tuple[int, ...] = ()

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._placement._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def argument_error(self, ranks: Topology, goes_on: bool) -> Exception | None:
        replica = self.replica
        if error := replica_error(replica, self) or self._placement.error(replica, ranks):
            return error
        if self._placement.serve and replica.device != "cpu":
            return ArgumentError(f"{self.describe()} works on the CPU, and this replica is on {replica.device}")
        return super().argument_error(ranks, goes_on)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self.replica.device == "cpu"

    @property
    def computing(self) -> tuple[int, ...]:
        """The ranks that compute gradients now."""
        idle = self.servers if self._placement.serve else ()
        return tuple(rank for rank in range(self.group.size) if rank not in idle)

    @property
    def workers(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each worker: one."""
        return tuple((rank,) for rank in self.computing)

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._placement = self._placement.renumbered(previous)

    def connect(self, group: RankGroup) -> None:
        self.servers = self._placement.owners(group.size)
        super().connect(group)

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        """As Strategy.rebuild. The remaining owners own everything. If none remains, rank 0 becomes the storage rank,
        but no worker a server: then RankLostError is raised on all ranks."""
        previous, comm = self.group.previous, self.group.comm
        servers = [rank for rank, old in enumerate(previous) if old in self.servers]
        if JOINED in previous:
            old = next(rank for rank, before in enumerate(previous) if before != JOINED)
            servers = root_value(comm, servers, "learn the ranks that own the parameters", old)
        self.servers = tuple(servers)
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

    def _make_step(self) -> ReducedStep:
        step, rank, computing = super()._make_step(), self.group.rank, self.computing
        self.part, self.parts = computing.index(rank) if rank in computing else None, len(computing)
        step.computes = self.part is not None
        return step

    def _effective_copies(self) -> int:
        if self._backs_up:
            return 2 if len(self.servers) > 1 and outlives_ranks(self) else 1
        return super()._effective_copies()

    def _divided(self, step: ReducedStep) -> StepOwners:
        if self.replica.device == "cpu":
            try:
                return super()._divided(step)
            except ArgumentError as error:  # on all ranks
                if self._placement.serve:
                    raise
                text = f"central storage copies the model's whole state in every step: {error}"
                notices.once(self.group.rank, text)
        return CopyingOwner(step, self.steps, self.servers[0])


class CopyingOwner(StepOwners):
    """One rank updates, and then broadcasts its complete state. root: that rank."""

    kind = "sharded"

    def __init__(self, step: ReducedStep, steps: int, root: int) -> None:
        super().__init__(step, steps)
        self._root, self._owner = root, step.comm.rank == root

    def reduce(self) -> None:
        step = self._step
        if gpu.is_gpu_array(step.buffer):
            host = step.buffer.get()
            step.backend.reduce_scatter(host, "sum")
            step.buffer.set(host)
        else:
            step.reduce("reduce_scatter")
        step.tell(slice(0, step.buffer.size if self._owner else 0))

    def squares(self) -> Any:
        return super().squares() if self._owner else None

    def update(self, squares: Any) -> None:
        together(self._comm, lambda: super(CopyingOwner, self).update(squares) if self._owner else None)

    def share(self) -> None:
        """Broadcast the owner's state, and the norm of its gradients, if it has one. Collective."""
        self._step.clock.start()
        with self._step.span(COMMUNICATION):
            state = together(self._comm, lambda: self._held() if self._owner else {})
            state = broadcast_arrays(self._comm, state, self._root, "broadcast the state of the storage rank")
            norm = state.pop(NORM, None)
            if norm is not None:
                self._step.rule.norms.set(float(norm))
            together(self._comm, lambda: None if self._owner else self._load(state))
        self._step.clock.stop()

    def _load(self, state: dict[str, np.ndarray]) -> None:
        self._replica.load_state(state)
        self.set_steps(self._steps + 1)

    def _held(self) -> dict[str, np.ndarray]:
        norm = self._step.rule.norms.of_step
        return self._replica.state() | ({} if norm is None else {NORM: np.array(float(norm))})
