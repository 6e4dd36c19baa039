"""The owners of slices: every rank updates only its own part of the flat parameters of a replica.

`trainers.state.sharded` gives all ranks all parameters. If a replica updates whole tensors only, a rank has slices that
end between tensors, often one, and the elements outside of its chunk of the backend's collectives are sent.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from allreduce.transport.control import together
from trainers.arrays.squares import sum_of_squares
from trainers.backends import bind_own
from trainers.errors import ArgumentError
from trainers.options.buckets import Bucket
from trainers.replica import (
    Slices,
    as_part,
    attach,
    check_divisible,
    clipped,
    copied,
    elements_of,
    reserved,
    sliced_entries,
    slices_of,
    snapshot_of,
    taken,
)
from trainers.state.adopt import Piece, gathered, to_root
from trainers.state.dealing import Share, joined, shares_of
from trainers.state.sharded import Flat, ShardedParameters
from trainers.stopwatch import COMMUNICATION
from trainers.strategies.rule import sum_over_ranks
from trainers.strategies.step import Step, StepOwners

REMEDY = "load the model again, and edit it by trainer.edit(function)"


class SliceOwners(StepOwners):
    """Every rank updates only the slice of the parameters that it owns: its chunk of the backend's collectives, or
    slices of whole tensors (Replica.whole_tensors). With the backend Central one rank owns everything.

    The constructor moves the replica's parameters into memory of this object. It is collective; the replicas must be
    equal. copies: the number of ranks that keep each slice, 1 or 2.

    Raises ArgumentError on all ranks if the replica can't be updated in slices.
    """

    kind = "sharded"
    own_part: Slices

    def __init__(self, step: Step, steps: int, copies: int = 1) -> None:
        super().__init__(step, steps)
        replica, comm = self._replica, self._comm
        self._backend, self._buffer = step.backend, step.buffer
        self._length, self._clock = replica.gradient_length, step.clock
        size, dtype, spans = self._buffer.size, str(replica.gradient_dtype), None
        if tensors := together(comm, lambda: replica.whole_tensors):
            # The owner of the last tensor also owns the statistics, metrics and flags.
            spans = [[*tensors[:-1], slice(tensors[-1].start, size)]]
        (self._share,) = shares_of(self._backend, comm, [size], spans, [self._buffer.dtype.itemsize])
        self._owned = joined(self._share.parts) or [slice(0, 0)]  # the slices of the buffer that this rank owns
        self.own_part = clipped(as_part(self._owned), 0, self._length)
        self._changing = False  # between `begin_change` and `synchronize_state`
        whole = [Bucket(dtype, 0, size, ())], [self._share]
        self.shards = ShardedParameters(
            self._backend, comm, *whole, self._allocate, replica.device, replica.versions, copies
        )
        (replica.cuts,) = self.shards.cuts
        self.shares_parameters, self.any_rank_may_fail = self.shards.shared, self.shards.backup is not None
        self._array: Any = self.shards.flats[dtype].array
        try:
            together(comm, self._bind)
        except Exception:
            self._free()
            raise
        self.synchronize_state()

    def _allocate(self, length: int, dtype: str, *, shared: Any) -> Flat:
        return Flat(self._step.allocate(length, dtype) if shared is None else shared)

    def _bind(self) -> None:
        check_divisible(self._replica, whole=True)
        attach(self._replica, self._array[: self._length], self._step.gradients)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Context manager: the block counts as communication."""
        self._clock.start()
        with self._step.span(COMMUNICATION):
            yield
        self._clock.stop()

    def begin_batch(self) -> None:
        """Back up the arrays that have no slices, because computing a batch may change them (statistics). Local."""
        if self.shards.backup is not None:
            without = ("parameters", *sliced_entries(self._replica))
            self.shards.backup.save_rest(partial(snapshot_of, self._replica, without=without))

    def sum_up(self) -> None:
        self._changing = False
        self._step.sum("reduce_scatter")
        if self._share.sends:
            with self._communicating():
                self._share.deliver(self._buffer)
        self._step.tell(as_part(self._owned) if self.shards.tells else slice(0, 0))

    def squares(self) -> Any:
        step = self._step
        if not step.scatters:
            return super().squares()
        own = sum(map(sum_of_squares, step.trained(self.own_part))) if self.shards.tells else 0.0
        self._clock.start()
        squares = sum_over_ranks(self._comm, own)
        self._clock.stop()
        return squares

    def share(self) -> None:
        self.share_parameters()
        self._back_up(self._steps)

    def share_parameters(self) -> None:
        """Gather the parameters that each rank has in its slice, or wait for the ranks of the node. Collective."""
        with self._communicating():
            self.shards.share()
        self.shards.accept_edits()
        self._replica.refresh()

    def _back_up(self, step: int) -> None:
        """Exchange backups of the slices after step `step`, if this update keeps backups. Collective."""
        if self.shards.backup is not None:
            with self._communicating():
                self.shards.backup.keep(step, self._slices, {"parameters": self._array})

    def _slices(self, memory: dict[str, np.ndarray]) -> list[Piece]:
        """Return copies of the slices that this rank owns, in `memory`; see `snapshot_of`. Local."""
        held = {name: elements_of(self._replica, name, self.own_part) for name in sliced_entries(self._replica)}
        held["parameters"] = taken(self._array, as_part(self._owned))
        held, pieces, start, first = copied(held, memory), [], 0, 0
        for own in self._owned:
            stop = start + own.stop - own.start
            (inside,) = slices_of(clipped(own, 0, self._replica.parameter_count))
            last = first + inside.stop - inside.start
            sliced = {name: array[first:last] for name, array in held.items()}
            sliced["parameters"] = held["parameters"][start:stop]
            pieces.append(Piece(self._since, self._steps, own.start, own.stop, sliced, {}))
            start, first = stop, last
        return pieces

    def set_steps(self, steps: int) -> None:
        self._steps = steps
        self.shards.extend(steps)

    def pieces(self) -> list[Piece]:
        """As StepOwners.pieces: copies of this rank's slices, and the backups. Local."""
        if self.shards.backup is not None:
            return self.shards.backup.pieces([] if self._changing else self._own())
        return self._own() if self._owned[0] != slice(0, 0) else []

    def _own(self) -> list[Piece]:
        """Return copies of this rank's slices, and of the arrays that have no slices. Local."""
        # load the statistics that follow the parameters: in an unfinished step they are from before the step
        self._replica.refresh()
        rest = snapshot_of(self._replica, {}, without=("parameters", *sliced_entries(self._replica)))
        return [each._replace(rest=rest) for each in self._slices({})]

    def begin_change(self) -> None:
        """As Owners.begin_change: other ranks may write into the shared segment before this rank does."""
        self.begin_batch()
        self._changing = True

    def synchronize_state(self) -> None:
        """As Owners.synchronize_state: wait for the ranks of the node, then back up the slices. Collective."""
        self.shards.fence()
        self.shards.accept_edits()
        self._since = self._steps
        self._back_up(self._steps)
        self._changing = False

    def check_edits(self) -> None:
        """Raise ArgumentError, on this rank only, if parameters that ranks share were edited in place. Local."""
        if text := self.shards.edit_error(REMEDY):
            raise ArgumentError(text)

    def not_replicated(self) -> dict[str, str]:
        """As Owners.not_replicated."""
        reasons = dict.fromkeys(sliced_entries(self._replica), "each rank holds only its own slice")
        if self.shards.one_copy:
            reasons["parameters"] = "the ranks share one copy"
        return reasons

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `state` with every array of `elementwise` gathered from the ranks that own its slices. Collective."""
        names = sliced_entries(self._replica)
        count = self._replica.parameter_count
        if not names or not count:
            return dict(state)
        parts = slices_of(clipped(self.own_part, 0, count)) if self.shards.tells else ()
        own = [Piece(0, 0, each.start, each.stop, {name: state[name][each] for name in names}, {}) for each in parts]
        # not the group's communicator, which is freed before `close` calls this
        return {**state, **gathered(self._backend.topology.world, own, count)}

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """As StepOwners.snapshot. Slices are received directly into rank 0's arrays. Collective."""
        replica, names = self._replica, sliced_entries(self._replica)
        state = together(self._comm, lambda: snapshot_of(replica, memory, without=names) if wanted else {})
        for name in names:
            own = together(self._comm, partial(self._elements, name, memory, state))
            to_root(self._comm, own, slices_of(clipped(self.own_part, 0, replica.parameter_count)), state.get(name))
        return state

    def _elements(self, name: str, memory: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> np.ndarray:
        """Return this rank's part of an entry. If `state` holds the parameters, add memory for the whole entry to it.
        Local."""
        own = elements_of(self._replica, name, self.own_part)
        if "parameters" in state:
            state[name] = reserved(memory, name, state["parameters"].shape, own.dtype)
        return own

    def close(self) -> None:
        """As StepOwners.close; frees the shared segment. Collective."""
        state = self.gather_state(self._replica.state())
        bind_own(self._replica)
        self._replica.load_state(state)
        del state  # may hold views of the segment
        self._free()

    def abandon(self) -> None:
        """Move the replica's parameters into memory of its own, without gathering the slices of other ranks. Local."""
        bind_own(self._replica)
        self._free()

    def _free(self) -> None:
        """Drop the memory, and what leads to other ranks. Local."""
        self._array, self._buffer = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._share = Share([])
        self.shards.free()
