"""The update of one rank whose whole state is copied to the others: for replicas whose parameters can't be shared."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.backend import AllReduce, TwoPhase
from allreduce.backends.central import Central
from allreduce.tracing.trace import Series, Trace, now
from allreduce.transport.control import all_values, together
from trainers.group import sent
from trainers.replica import Replica
from trainers.state.pieces import MEASURED, Piece
from trainers.stopwatch import Stopwatch
from trainers.strategies.interface import nothing
from trainers.strategies.sharded import ShardedUpdate


class CopiedUpdate:
    """Stands in for ShardedUpdate where one rank owns everything. All methods are collective.

    backend: whose `owned` is all of a buffer on one rank. buffer: the gradients, then what is measured, on the
        replica's device. measured: the latter; an array of its own, reduced before the step, behind 16-bit gradients.
    """

    in_common = False
    all_twice = True

    def __init__(
        self,
        replica: Replica,
        backend: TwoPhase,
        buffer: Any,
        comm: MPI.Intracomm,
        clock: Stopwatch,
        measured: Any,
        steps: int = 0,
    ) -> None:
        self._replica, self._backend, self._buffer = replica, backend, buffer
        self._comm, self._clock, self._measured = comm, clock, measured
        self._span: Callable[[str], AbstractContextManager[None]] = nothing
        self._copies: Series | None = None
        self._steps = self._since = steps  # that were taken, and after which this rank's replica has changed
        self._root = all_values(comm, backend.owned(1).stop, "learn who updates").index(1)

    def begin_batch(self) -> None:
        """Nothing: a batch that is undone leaves the state as it was."""

    def step(self) -> Any:
        """Reduce the buffer, update on one rank, copy its state; returns what was measured, reduced, a view."""
        self._clock.start()
        self._reduce()
        self._clock.stop()
        owner = self._comm.rank == self._root
        failed = owner and bool(self._measured[-1])
        with self._span("update"):
            together(self._comm, lambda: self._change(self._replica.update) if owner and not failed else None)
        self._clock.start()
        begin = now()
        self._copy(owner)
        if self._copies is not None:
            self._copies.note("copy of the state", begin, {})
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
        state = sent(self._comm, state, self._root, "copy the state of the rank that updates")
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

    def note_step(self, steps: int) -> None:
        """As ShardedUpdate.note_step."""
        self._steps = steps

    def rescue(self) -> list[Piece]:
        """As ShardedUpdate.rescue: every rank has the whole state, before a step or after it."""
        return [Piece(self._since, self._steps, 0, self._buffer.size, {}, self._replica.snapshot({}))]

    def _held(self) -> dict[str, np.ndarray]:
        """This rank's state and what was measured, contiguous and on the host."""
        held = self._replica.state() | {MEASURED: _on_host(self._measured)}
        return {name: np.asarray(array, order="C") for name, array in held.items()}

    def record(self, backend: AllReduce, trace: Trace | None) -> None:
        """As ShardedUpdate.record."""
        assert isinstance(backend, TwoPhase)
        self._backend, self._span = backend, nothing if trace is None else trace.span
        self._copies = None if trace is None else trace.series("copies")

    def apart(self) -> dict[str, str]:
        """Nothing: every rank has all of it."""
        return {}

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A replica's state, of which every rank has all."""
        return dict(state)

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """As ShardedUpdate.snapshot, with no need of the other ranks."""
        return together(self._comm, lambda: self._replica.snapshot(memory) if wanted else {})

    def settle(self) -> None:
        """Nothing: every rank has parameters of its own."""

    def check_edits(self) -> None:
        """Nothing: every rank has parameters of its own."""

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """Let go of the backend's memory. Local."""
        self._buffer = self._measured = np.empty(0, np.uint8)


def _on_host(array: Any) -> np.ndarray:
    return array.get() if gpu.is_gpu_array(array) else array


class CentralUpdate(ShardedUpdate):
    """The sharded update whose one owner, the backend's root, sees before it updates that a rank has failed.

    measured: where the flags are, the last of which says that: behind the gradients, or an array that is reduced
        before the step.
    """

    def __init__(
        self,
        replica: Replica,
        backend: Central,
        buffer: np.ndarray,
        comm: MPI.Intracomm,
        clock: Stopwatch,
        measured: np.ndarray,
        steps: int,
        copies: int = 1,
    ) -> None:
        super().__init__(replica, backend, buffer, comm, clock, steps, copies)
        self._owner = backend.rank == backend.root
        self._measured = measured
        self._beside = measured.size > 0 and buffer.size == self._length

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


def _moved(storage: int, former: tuple[int, ...]) -> int:
    """The rank that was `storage`, or 0 where it is lost."""
    return former.index(storage) if storage in former else 0
