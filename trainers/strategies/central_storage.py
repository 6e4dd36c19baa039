"""The strategy of CentralStorageTrainer: one rank holds the parameters and the optimizer, all ranks compute.

The gradients are added up on that rank, it updates, and the parameters go back into the memory of all replicas. On one
node that memory is one, so nothing goes back: who computes reads where the storage rank has written. A replica whose
parameters can't be shared gets a copy of the whole state instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.backend import AllReduce, TwoPhase
from allreduce.backends.central import Central
from allreduce.elastic.standby import JOINED
from allreduce.topology import Topology
from allreduce.tracing.trace import now
from allreduce.transport.control import all_values, root_value, together
from trainers.errors import ArgumentError
from trainers.group import broadcast_arrays
from trainers.replica import Replica
from trainers.strategies.interface import replica_refusal
from trainers.strategies.mirrored import Mirrored
from trainers.strategies.sharded import Parts, ShardedUpdate, Update

DEVICES = ("cpu", "cuda")
MEASURED = "trainer.measured"  # the name by which the means of a step travel with a state


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

    def refusal(self, ranks: Topology, goes_on: bool) -> Exception | None:
        storage, device = self.storage, self._device
        if error := replica_refusal(self.replica, self):
            return error
        if isinstance(storage, bool) or not isinstance(storage, int) or not 0 <= storage < ranks.size:
            return ArgumentError(f"storage must be a rank of this training, 0 to {ranks.size - 1}, got {storage!r}")
        if device not in (None, *DEVICES):
            return ArgumentError(f"device={device!r} is unknown; use one of {', '.join(DEVICES)}, or None")
        if device not in (None, self.replica.device):
            return ArgumentError(
                f'device="{device}": this {type(self.replica).__name__} is on {self.replica.device}, and a replica '
                f"updates where it is; make all replicas on {device}, or leave out device"
            )
        return super().refusal(ranks, goes_on)

    @property
    def rebuildable(self) -> bool:  # type: ignore[override]
        return self.replica.device == "cpu"

    def renumber(self, previous: tuple[int, ...]) -> None:
        self.storage = previous.index(self.storage) if self.storage in previous else 0

    def rebuild(self) -> None:
        """The storage rank stays, where it is left; rank 0 takes its place."""
        previous = self.group.previous
        self.renumber(previous)
        if JOINED in previous:
            old = next(rank for rank, before in enumerate(previous) if before != JOINED)
            self.storage = root_value(self.group.comm, self.storage, "hear where the storage is", old)
        super().rebuild()

    def _make_backend(self) -> AllReduce:
        topology = self.group.topology
        with topology.trial():
            return Central(topology, root=self.storage)

    def _divided(self) -> Update:
        if self.replica.device == "cpu":
            try:
                return CentralUpdate(self._parts, self.storage, self._copies_kept())
            except ArgumentError as refusal:  # on all ranks
                text = f"central storage copies the model's whole state in every step: {refusal}"
                notices.once(self.group.rank, text)
        return CopiedUpdate(self._parts)

    @property
    def errors_in_step(self) -> bool:
        """The storage rank sees the flags of all before it updates."""
        return self.replica.device == "cpu"


class CopiedUpdate(Update):
    """One rank updates, the one that owns all of a buffer, and its whole state is copied to the others."""

    series = ("copies",)
    _backend: TwoPhase

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._root = all_values(self._comm, self._backend.owned(1).stop, "learn who updates").index(1)

    def step(self) -> Any:
        """Reduce the buffer, update on one rank, copy its state; returns what was measured, reduced, a view."""
        self._clock.start()
        self._reduce()
        self._clock.stop()
        owner = self._comm.rank == self._root
        failed = owner and bool(self._measured[-1])
        with self.span("update"):
            together(self._comm, lambda: self._change(self._replica.update) if owner and not failed else None)
        self._clock.start()
        begin = now()
        self._copy(owner)
        self.note("copies", "copy of the state", begin)
        self._clock.stop()
        return self._measured

    def _reduce(self) -> None:
        if not gpu.is_gpu_array(self._buffer):
            self._backend.reduce_scatter(self._buffer, "sum")
            return
        host = self._buffer.get()
        self._backend.reduce_scatter(host, "sum")
        self._buffer.set(host)

    def _copy(self, owner: bool) -> None:
        """The owner's state and what was measured, to all ranks."""
        state = together(self._comm, lambda: self._held() if owner else {})
        state = broadcast_arrays(self._comm, state, self._root, "copy the state of the rank that updates")
        measured = state.pop(MEASURED)
        if gpu.is_gpu_array(self._measured):
            self._measured.set(measured)
        else:
            self._measured[:] = measured
        change = partial(self._replica.load_state, state)
        together(self._comm, lambda: None if owner else self._change(change))

    def _change(self, change: Callable[[], object]) -> None:
        """Have the replica be that of the next step."""
        change()
        self._steps = self._since = self._steps + 1

    def _held(self) -> dict[str, np.ndarray]:
        """This rank's state and what was measured, on the host."""
        return self._replica.state() | {MEASURED: _on_host(self._measured)}

    def abandon(self) -> None:
        """Let go of the backend's memory. Local."""
        self._buffer = self._measured = np.empty(0, np.uint8)


def _on_host(array: Any) -> np.ndarray:
    return array.get() if gpu.is_gpu_array(array) else array


class CentralUpdate(ShardedUpdate):
    """The sharded update whose one owner, the backend's root, sees before it updates that a rank has failed."""

    def __init__(self, parts: Parts, root: int, copies: int = 1) -> None:
        super().__init__(parts, copies)
        self._owner = self._comm.rank == root
        self._beside = self._measured.size > 0 and self._buffer.size == self._length

    def _update(self) -> bool:
        updates = self._owner and not self._measured[-1]
        if updates:
            self._replica.update(self._part)
        return updates

    def _after(self, measured: np.ndarray) -> bool:
        flags = self._measured if self._beside else measured
        updated = not flags[-1]
        if updated and not self._owner:
            self._replica.update(self._part)  # of nothing: an optimizer counts its steps
        return updated
