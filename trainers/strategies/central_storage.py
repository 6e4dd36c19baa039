"""The strategy of CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute.

The storage rank sums the gradients and updates the parameters; the other ranks then receive the parameters. On one node
the parameters are in shared memory, so nothing is sent. A replica whose parameters can't be moved into the trainer's
memory receives a copy of the whole state instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from allreduce import create, notices
from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.transport.control import all_values, root_value, together
from trainers.arguments import is_integer, name_error
from trainers.errors import ArgumentError
from trainers.group import broadcast_arrays
from trainers.replica import Replica
from trainers.stopwatch import COMMUNICATION
from trainers.strategies.central import Central
from trainers.strategies.interface import Strategy, replica_error
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.sharded import ShardedUpdate, Update

DEVICES = ("cpu", "cuda")
MEASURED, NORM = "trainer.measured", "trainer.norm"  # in a broadcast state: `measured`, and the norm of the gradients


class CentralStorage(Mirrored):
    """Mirrored with the backend Central, whose root owns everything; see CentralStorageTrainer for the arguments.

    storage: the rank that holds the parameters and updates them.
    """

    def __init__(self, replica: Replica, name: str, storage: int, device: str | None, copies: int) -> None:
        super().__init__(replica, name, None, None, "sharded", copies=copies)
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

    def rebuild(self) -> None:
        """Keep the storage rank if it remains; otherwise rank 0 becomes the storage rank."""
        previous = self.group.previous
        self.renumber(previous)
        if JOINED in previous:
            old = next(rank for rank, before in enumerate(previous) if before != JOINED)
            self.storage = root_value(self.group.comm, self.storage, "learn the storage rank", old)
        super().rebuild()

    def _make_backend(self) -> AllReduce:
        return create(Central, self.group.topology, root=self.storage)

    def _make_sharded_update(self) -> Update:
        if self.replica.device == "cpu":
            try:
                return CentralUpdate(self, *self._reduced, root=self.storage, copies=self._effective_copies())
            except ArgumentError as error:  # on all ranks
                text = f"central storage copies the model's whole state in every step: {error}"
                notices.once(self.group.rank, text)
        return CopiedUpdate(self, *self._reduced)

    @property
    def errors_in_step(self) -> bool:
        """True on the CPU: the storage rank reads the summed flags before it updates."""
        return self.replica.device == "cpu"


class CopiedUpdate(Update):
    """Update in which the storage rank updates, and then broadcasts its complete state."""

    def __init__(self, strategy: Strategy, *reduced: Any) -> None:
        super().__init__(strategy, *reduced)
        self._root = all_values(self._comm, self._backend.owned(1).stop, "learn which rank updates").index(1)

    def step(self) -> Any:
        """Reduce the buffer, update on the storage rank, broadcast its state. Returns the reduced metrics and flags, a
        view. Collective."""
        self._clock.start()
        self._reduce()
        self._clock.stop()
        owner = self._comm.rank == self._root
        failed = owner and bool(self._measured[-1])
        with self._strategy.span("update"):
            together(self._comm, lambda: self._change(self._apply) if owner and not failed else None)
        self._clock.start()
        with self._strategy.span(COMMUNICATION):
            self._broadcast_state(owner)
        self._clock.stop()
        return self._measured

    def _reduce(self) -> None:
        if not gpu.is_gpu_array(self._buffer):
            self._backend.reduce_scatter(self._buffer, "sum")
            return
        host = self._buffer.get()
        self._backend.reduce_scatter(host, "sum")
        self._buffer.set(host)

    def _broadcast_state(self, owner: bool) -> None:
        """Broadcast the owner's state and `measured` to all ranks. Collective."""
        state = together(self._comm, lambda: self._held() if owner else {})
        state = broadcast_arrays(self._comm, state, self._root, "broadcast the state of the storage rank")
        measured, norm = state.pop(MEASURED), state.pop(NORM, None)
        if norm is not None:
            self._rule.norms.set(float(norm))
        if gpu.is_gpu_array(self._measured):
            self._measured.set(measured)
        else:
            self._measured[:] = measured
        change = partial(self._replica.load_state, state)
        together(self._comm, lambda: None if owner else self._change(change))

    def _change(self, change: Callable[[], object]) -> None:
        """Call `change`, which brings the replica to the next step, and count the step. Local."""
        change()
        self._steps = self._since = self._steps + 1

    def _held(self) -> dict[str, np.ndarray]:
        """Return this rank's state, `measured` and the norm of its gradients, if it has one, as host arrays. Local."""
        norm = self._rule.norms.of_step
        own = {} if norm is None else {NORM: np.array(float(norm))}
        return self._replica.state() | {MEASURED: _on_host(self._measured)} | own

    def abandon(self) -> None:
        """Drop the references to the backend's memory. Local."""
        self._buffer = self._measured = np.empty(0, np.uint8)


def _on_host(array: Any) -> np.ndarray:
    return array.get() if gpu.is_gpu_array(array) else array


class CentralUpdate(ShardedUpdate):
    """Sharded update with a single owner, the backend's root, which skips the update if a rank has set "failed"."""

    def __init__(self, strategy: Strategy, *reduced: Any, root: int, copies: int = 1) -> None:
        super().__init__(strategy, *reduced, copies=copies)
        self._owner = self._comm.rank == root

    def _update(self) -> bool:
        updates = self._owner and not self._measured[-1]
        if updates:
            self._apply(self._part, self._squares)
        return updates

    def _finish_step(self, measured: np.ndarray) -> bool:
        flags = self._measured if self._separate else measured
        updated = not flags[-1]
        if updated and not self._owner:
            self._apply(self._part, self._squares)  # an empty slice: only the optimizer's step count changes
        return updated
