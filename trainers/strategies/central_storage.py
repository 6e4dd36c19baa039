"""The strategy of CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute.

The storage rank sums the gradients and updates the parameters; the other ranks then receive the parameters. On one node
the parameters are in shared memory, so nothing is sent. A replica whose parameters can't be moved into the trainer's
memory receives a copy of the whole state instead.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce import create, notices
from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.transport.control import root_value, together
from trainers.arguments import is_integer, name_error
from trainers.errors import ArgumentError
from trainers.group import broadcast_arrays
from trainers.options.average import Sharded
from trainers.replica import Replica
from trainers.stopwatch import COMMUNICATION
from trainers.strategies.central import Central
from trainers.strategies.interface import replica_error
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.step import ReducedStep, StepOwners

DEVICES = ("cpu", "cuda")
NORM = "trainer.norm"  # in a broadcast state: the norm of the gradients


class CentralStorage(Mirrored):
    """Mirrored with the backend Central, whose root owns everything; see CentralStorageTrainer for the arguments.

    storage: the rank that holds the parameters and updates them.
    """

    def __init__(self, replica: Replica, name: str, storage: int, device: str | None, copies: int) -> None:
        super().__init__(replica, name, None, None, Sharded())
        self._copies = copies
        self.storage, self._device = storage, device

    def describe(self) -> str:
        options = f"storage={self.storage!r}, device={self._device!r}, copies={self._copies!r}"
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def argument_error(self, ranks: Topology, goes_on: bool) -> Exception | None:
        storage, device = self.storage, self._device
        if error := replica_error(self.replica, self):
            return error
        if not is_integer(storage, 0, ranks.size - 1):
            return ArgumentError(f"storage must be a rank of this training, 0 to {ranks.size - 1}, got {storage!r}")
        if text := name_error("device", device, DEVICES, optional=True):
            return ArgumentError(text)
        if device not in (None, self.replica.device):
            return ArgumentError(
                f'device="{device}": this {type(self.replica).__name__} is on {self.replica.device}, and the device of '
                f"the parameters must be that of the replicas; create these on {device}, or leave out device"
            )
        return super().argument_error(ranks, goes_on)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self.replica.device == "cpu"

    def renumber(self, previous: tuple[int, ...]) -> None:
        self.storage = previous.index(self.storage) if self.storage in previous else 0

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        """Keep the storage rank if it remains; otherwise rank 0 becomes the storage rank."""
        previous = self.group.previous
        self.renumber(previous)
        if JOINED in previous:
            old = next(rank for rank, before in enumerate(previous) if before != JOINED)
            self.storage = root_value(self.group.comm, self.storage, "learn the storage rank", old)
        return super().rebuild(go_back)

    def _make_backend(self) -> AllReduce:
        return create(Central, self.group.topology, root=self.storage)

    def _divided(self, step: ReducedStep) -> StepOwners:
        if self.replica.device == "cpu":
            try:
                return super()._divided(step)
            except ArgumentError as error:  # on all ranks
                text = f"central storage copies the model's whole state in every step: {error}"
                notices.once(self.group.rank, text)
        return CopyingOwner(step, self.steps, self.storage)


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
