"""The sharded update: every rank updates only the slice of the parameters whose gradients it has finished.

reduce_scatter -> the replica's update of a slice -> all_gather of the parameters. Where ranks that together
own everything share a node, the parameters live in one window of the node, so every rank writes where all
read, and nothing is gathered. What the trainer measures lies behind the gradients, and behind the parameters
it comes back to all ranks, without a message of its own.
S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes, gpu
from allreduce.backend import AllReduce, TwoPhase
from allreduce.errors import UnavailableError
from allreduce.tracing.trace import Series, Trace, now
from allreduce.transport.control import combine, on_all, together
from allreduce.transport.shared_segment import CommonSegment
from trainers.backends import own_memory
from trainers.errors import ArgumentError
from trainers.replica import Replica, reserved
from trainers.state.adopt import Piece, to_root
from trainers.state.backup import Backup
from trainers.stopwatch import Stopwatch
from trainers.strategies.interface import untraced


class Parts(NamedTuple):
    """What an update works with.

    backend: reduces `buffer` in every step: the gradients, then what is measured. measured: the latter; behind 16-bit
    gradients an array of its own, which is reduced before the step. comm: of all ranks. clock: runs while a rank waits
    for others. steps: that were taken before.
    """

    replica: Replica
    backend: AllReduce
    buffer: Any
    measured: Any
    comm: MPI.Intracomm
    clock: Stopwatch
    steps: int


class Update:
    """How Mirrored changes the parameters by gradients that all ranks have computed: what is so unless a kind differs.

    any_rank_may_fail, apart, check_edits, share, whole: as of Strategy.
    in_common: whether the ranks of a node have one copy of the parameters.
    """

    any_rank_may_fail = True
    in_common = False
    span: Callable[[str], AbstractContextManager[None]] = staticmethod(untraced)

    def __init__(self, parts: Parts) -> None:
        self._replica, self._backend, self._buffer, self._measured, self._comm, self._clock, self._steps = parts
        self._since = self._steps  # the step after which this rank has updated
        self._length = self._replica.gradient_length
        self._series: dict[str, Series] | None = None

    def begin_batch(self) -> None:
        """A batch is computed, which may change what belongs to the state. Local."""

    def step(self) -> Any:
        """Reduce the buffer, update the parameters; returns what was measured, reduced, a view. Collective."""
        raise NotImplementedError

    def count_steps(self, steps: int) -> None:
        """So many steps were taken; one in which nothing was updated counts as well. Local."""
        self._steps = steps

    def pieces(self) -> list[Piece]:
        """What this rank has of the state, copied: all of it, before a step or after it. Local."""
        return [Piece(self._since, self._steps, 0, self._buffer.size, {}, self._replica.snapshot({}))]

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """A copy of the replica's whole state in `memory` on rank 0, where it is wanted; elsewhere none. Collective."""
        return together(self._comm, lambda: self._replica.snapshot(memory) if wanted else {})

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(state)

    def share(self) -> None: ...

    def check_edits(self) -> None: ...

    def apart(self) -> dict[str, str]:
        return {}

    def record(self, backend: AllReduce, trace: Trace | None) -> None:
        """Record in `trace` what is done here; the calls of `backend` are recorded there. Local."""
        self._backend, self.span = backend, untraced if trace is None else trace.span
        self._series = None if trace is None else {name: trace.series(name) for name in self.series}

    series: tuple[str, ...] = ()  # the names of those in a trace

    def note(self, series: str, what: str, begin: int) -> None:
        """Record what all ranks have done together since `begin`. Local."""
        if self._series is not None:
            self._series[series].note(what, begin, {})

    def close(self) -> None:
        """Give the replica parameters of its own again, and its whole state. Collective."""

    def abandon(self) -> None:
        """Let go of memory that the ranks share. Local."""


class ShardedUpdate(Update):
    """Moves a replica's parameters into memory of this object's. Creating and all methods are collective.

    The replicas are equal. copies: how many ranks have each slice: 1 or 2.

    Raises ArgumentError on all ranks when the replica can't be updated in slices.
    """

    _backend: TwoPhase

    def __init__(self, parts: Parts, copies: int = 1) -> None:
        super().__init__(parts)
        replica, comm = self._replica, self._comm
        self._mine = self._backend.owned(self._buffer.size)
        self._part = slice(*self._mine.indices(self._length)[:2])
        self._window: CommonSegment | None = None
        self._array = self._allocate(str(replica.gradient_dtype))
        self._backup: Backup | None = None
        self.series = ("fences", "second copies") if copies == 2 else ("fences",)
        try:
            together(comm, lambda: replica.bind_parameters(self._array[: self._length]))
            if copies == 2:
                owned = self._mine.start, self._mine.stop
                self._backup = Backup(comm, self._backend.topology.node_index, [owned])
        except Exception:
            self._free()
            raise
        self.share()

    def _allocate(self, dtype: str) -> Any:
        """Memory that the ranks of the node have in common, where these own everything, on the CPU, and it has room."""
        node, device = self._backend.topology.node, self._replica.device
        owned = combine(node, np.array([self._mine.stop - self._mine.start]), "add up what the ranks of a node own")
        whole = device == "cpu" and owned[0] == self._buffer.size
        if on_all(self._comm, whole, "see whether each node owns everything"):
            try:
                self._window = CommonSegment(node, self._buffer.size, dtypes.parse(dtype))
            except UnavailableError as error:  # on all ranks of this node, and perhaps of no other
                notices.once(node.rank, f"each rank has parameters of its own: {error}")
            if on_all(self._comm, self._window is not None, "see whether each node has common memory"):
                assert self._window is not None
                return self._window.array
            self._free()
        return self._backend.allocate(self._buffer.size, dtype, device=device)

    @property
    def any_rank_may_fail(self) -> bool:  # type: ignore[override]
        return self._backup is not None

    def begin_batch(self) -> None:
        """A batch is computed, which may change what belongs to the state. Local."""
        if self._backup is not None:
            without = ("parameters", *self._replica.elementwise)
            self._backup.keep_rest(partial(self._replica.snapshot, without=without))

    def step(self) -> np.ndarray:
        """Reduce the buffer, update the parameters everywhere; returns what was measured, reduced, a view."""
        taken = self._steps + 1
        self._clock.start()
        self._backend.reduce_scatter(self._buffer, "sum")
        self._clock.stop()
        with self.span("update"):
            updated = self._update()
        measured = slice(max(self._mine.start, self._length), max(self._mine.stop, self._length))
        self._array[measured] = self._buffer[measured]
        if updated:
            self._steps = self._since = taken
        self._clock.start()
        if self._window is None:
            self._backend.all_gather(self._array)
        else:
            begin = now()
            self.fence()
            self.note("fences", "meet in common memory", begin)
        self._clock.stop()
        self._replica.refresh()
        if self._after(self._array[self._length :]):
            self._keep(taken)
        return self._array[self._length :]

    def _keep(self, step: int) -> None:
        """Back up the slices as they are after a step. Collective."""
        if self._backup is None:
            return
        self._clock.start()
        begin = now()
        replica = self._replica
        sliced = {name: replica.elements(name, self._part) for name in replica.elementwise}
        sliced["parameters"] = self._array[self._mine]
        own = Piece(step, step, self._mine.start, self._mine.stop, sliced, {})
        self._backup.keep(step, [own], {"parameters": self._array})
        self.note("second copies", "keep slices twice", begin)
        self._clock.stop()

    def _update(self) -> bool:
        """Update what this rank owns; whether it was."""
        self._replica.update(self._part)
        return True

    def count_steps(self, steps: int) -> None:
        super().count_steps(steps)
        if self._backup is not None:
            self._backup.extend(steps)

    def pieces(self) -> list[Piece]:
        """What this rank has of the state, by itself, copied. Local."""
        if self._backup is not None:
            return self._backup.pieces([self._own()])
        return [self._own()] if self._mine.start < self._mine.stop else []

    def _own(self) -> Piece:
        """A copy of what this rank owns."""
        self._replica.refresh()  # statistics, as they lie behind the parameters: in an unfinished step as they were
        names = self._replica.elementwise
        state = self._replica.snapshot({}, without=("parameters", *names))
        sliced = {name: np.array(self._replica.elements(name, self._part)) for name in names}
        sliced["parameters"] = np.array(self._array[self._mine])  # and what was measured, behind them
        return Piece(self._since, self._steps, self._mine.start, self._mine.stop, sliced, state)

    def _after(self, measured: np.ndarray) -> bool:
        """All ranks are through the update, and this was measured; whether parameters were updated."""
        return True

    def fence(self) -> None:
        """Afterwards all ranks of the node see what any of them has written, and none of them still writes."""
        if self._window is not None:
            self._window.fence()
            self._replica.accept_edits()

    def share(self) -> None:
        """The state was changed otherwise than by a step: go on when all ranks have done so. Collective."""
        self.fence()
        self._since = self._steps
        self._keep(self._steps)

    @property
    def in_common(self) -> bool:  # type: ignore[override]
        """Whether the ranks of a node have one copy of the parameters."""
        return self._window is not None

    def check_edits(self) -> None:
        """Raise ArgumentError, on this rank, when parameters that ranks have in common were edited in place."""
        if self._window is not None and (name := self._replica.edited()):
            raise ArgumentError(
                f'{name} was edited in place (p.mul_(...), say), and with update="sharded" the parameters of all ranks '
                "of a node are the same memory, so it may have been edited several times; load the model again, and "
                "edit it by trainer.edit(function)"
            )

    def apart(self) -> dict[str, str]:
        """As Strategy.apart."""
        apart = dict.fromkeys(self._replica.elementwise, "every rank has its own slice only")
        if self._window is not None and self._backend.topology.nodes == 1:
            apart["parameters"] = "the ranks have one copy of them in common"
        return apart

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A replica's state, with what belongs to the slices collected from their owners."""
        result = dict(state)
        for name in self._replica.elementwise:
            array = result[name]
            part = slice(*self._mine.indices(array.size)[:2])
            # Between two steps nobody needs the gradients.
            fits = array.dtype == self._buffer.dtype and not gpu.is_gpu_array(self._buffer)
            gathered = self._buffer if fits else np.zeros(self._buffer.size, array.dtype)
            gathered[part] = array[part]
            self._backend.all_gather(gathered)
            result[name] = gathered[: array.size].copy()
        return result

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """A copy of the replica's whole state in `memory` on rank 0, where it is wanted; elsewhere none. Collective.

        Slices go straight to their places there.
        """
        replica, names = self._replica, self._replica.elementwise
        state = together(self._comm, lambda: replica.snapshot(memory, without=names) if wanted else {})
        for name in names:
            own = together(self._comm, partial(replica.elements, name, self._part))
            whole = reserved(memory, name, (state["parameters"].size,), own.dtype) if wanted else None
            to_root(self._comm, own, self._part.start, whole)
            if whole is not None:
                state[name] = whole
        return state

    def close(self) -> None:
        """Give the replica parameters of its own again, and its whole state."""
        state = self.whole(self._replica.state())
        self._replica.bind_parameters(own_memory(self._replica))
        self._replica.load_state(state)
        del state  # may hold views of the window
        self._free()

    def abandon(self) -> None:
        """Give the replica parameters of its own, without what other ranks have of its state. Local."""
        self._replica.bind_parameters(own_memory(self._replica))
        self._array, self._buffer = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._window = self._backup = None

    def _free(self) -> None:
        """Collective over the node."""
        self._array = np.empty(0, np.uint8)
        if self._window is not None:
            self._window.free()
            self._window = None
