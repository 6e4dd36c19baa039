"""The sharded update: every rank updates only its own slice of the parameters.

reduce_scatter -> the replica's update of a slice -> all_gather of the parameters. If a replica updates whole tensors
only, a rank has slices that end between tensors, often one, and the elements outside of its chunk of these collectives
are sent. If the ranks of each node together own the whole buffer, the parameters are in one shared segment per node:
every rank writes its slice there, and nothing is gathered.

S. Rajbhandari et al.: ZeRO: Memory optimizations toward training trillion parameter models, 2020 (stage 1).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import together
from trainers.backends import bind_own
from trainers.errors import ArgumentError
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
from trainers.state.adopt import Piece, to_root
from trainers.state.backup import Backup
from trainers.state.dealing import Share, deal_tensors, joined
from trainers.state.owners import EDITED_IN_PLACE, NodeMemory
from trainers.stopwatch import COMMUNICATION
from trainers.strategies.rule import sum_over_ranks
from trainers.strategies.step import ReducedStep, StepOwners
from trainers.transforms.clip import sum_of_squares


class SliceOwners(StepOwners):
    """Every rank updates only the slice of the parameters that it owns: its chunk of the backend's collectives, or
    slices of whole tensors (Replica.whole_tensors). With the backend Central one rank owns everything.

    The constructor moves the replica's parameters into memory of this object. It is collective; the replicas must be
    equal. copies: the number of ranks that keep each slice, 1 or 2.

    Raises ArgumentError on all ranks if the replica can't be updated in slices.
    """

    kind = "sharded"

    def __init__(self, step: ReducedStep, steps: int, copies: int = 1) -> None:
        super().__init__(step, steps)
        replica, comm = self._replica, self._comm
        self._backend, self._buffer = step.backend, step.buffer
        self._length, self._clock = replica.gradient_length, step.clock
        self._messages: MPI.Intracomm | None = None  # between the owners of chunks and those of whole tensors
        whole = together(comm, lambda: replica.whole_tensors)
        self._share = self._deal(whole) if whole else Share((self._backend.owned(self._buffer.size),))
        self._owned = joined(self._share.parts) or [slice(0, 0)]  # the slices of the buffer that this rank owns
        self._part = clipped(as_part(self._owned), 0, self._length)
        size, dtype = self._buffer.size, str(replica.gradient_dtype)
        self._node = NodeMemory(self._backend.topology, comm, self._owned_elements, {dtype: size}, replica.device)
        shared, allocate = self._node.arrays, self._backend.allocate
        self._array: Any = shared[dtype] if shared else allocate(size, dtype, device=replica.device)
        self._backup: Backup | None = None
        self._versions: dict[str, int] = {}  # of the parameters, when the ranks last had the same
        self._changing = False  # between `begin_change` and `synchronize_state`
        try:
            together(comm, self._bind)
            if copies == 2:
                owned = [[each.start, each.stop] for each in self._owned]
                self._backup = Backup(comm, self._backend.topology.node_index, owned)
        except Exception:
            self._free()
            raise
        self.synchronize_state()

    def _deal(self, tensors: tuple[slice, ...]) -> Share:
        """Return the whole tensors that this rank owns. The owner of the last one also owns the statistics, metrics and
        flags. Collective."""
        spans = [*tensors[:-1], slice(tensors[-1].start, self._buffer.size)]
        self._messages = self._backend.topology.private()  # the group's communicator is freed before `close`
        return deal_tensors(self._backend, self._messages, [spans], [self._buffer.dtype.itemsize])[0]

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

    @property
    def _owned_elements(self) -> int:
        return sum(each.stop - each.start for each in self._owned)

    @property
    def any_rank_may_fail(self) -> bool:  # type: ignore[override]
        return self._backup is not None

    def begin_batch(self) -> None:
        """Back up the arrays that have no slices, because computing a batch may change them (statistics). Local."""
        if self._backup is not None:
            without = ("parameters", *sliced_entries(self._replica))
            self._backup.save_rest(partial(snapshot_of, self._replica, without=without))

    def reduce(self) -> None:
        self._changing = False
        self._step.reduce("reduce_scatter")
        if self._share.transfer is not None:
            with self._communicating():
                self._share.deliver(self._buffer)
        self._step.tell(as_part(self._owned) if self._node.tells else slice(0, 0))

    def squares(self) -> Any:
        step = self._step
        if not step.scatters:
            return super().squares()
        own = sum(map(sum_of_squares, step.trained(self._part))) if self._node.tells else 0.0
        self._clock.start()
        squares = sum_over_ranks(self._comm, own)
        self._clock.stop()
        return squares

    def share(self) -> None:
        self.share_parameters()
        self._back_up(self._steps)

    @property
    def own_part(self) -> Slices | None:
        return self._part

    def share_parameters(self) -> None:
        """Gather the parameters that each rank has in its slice, or wait for the ranks of the node. Collective."""
        if self._node.arrays:
            with self._communicating():
                self.fence()
        else:
            if self._share.transfer is not None:
                with self._communicating():
                    self._share.collect(self._array)
            self._step.run("all_gather", self._array)
        self._replica.refresh()

    def _back_up(self, step: int) -> None:
        """Exchange backups of the slices after step `step`, if this update keeps backups. Collective."""
        if self._backup is not None:
            with self._communicating():
                self._backup.keep(step, self._slices, {"parameters": self._array})

    def _slices(self, memory: dict[str, np.ndarray]) -> list[Piece]:
        """Return copies of the slices that this rank owns, in `memory`; see `snapshot_of`. Local."""
        held = {name: elements_of(self._replica, name, self._part) for name in sliced_entries(self._replica)}
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
        if self._backup is not None:
            self._backup.extend(steps)

    def pieces(self) -> list[Piece]:
        """As StepOwners.pieces: copies of this rank's slices, and the backups. Local."""
        if self._backup is not None:
            return self._backup.pieces([] if self._changing else self._own())
        return self._own() if self._owned_elements else []

    def _own(self) -> list[Piece]:
        """Return copies of this rank's slices, and of the arrays that have no slices. Local."""
        # load the statistics that follow the parameters: in an unfinished step they are from before the step
        self._replica.refresh()
        rest = snapshot_of(self._replica, {}, without=("parameters", *sliced_entries(self._replica)))
        return [each._replace(rest=rest) for each in self._slices({})]

    def fence(self) -> None:
        """Wait until all ranks of the node have finished writing to the shared segment, and see all writes. Collective
        over the node."""
        if self._node.arrays:
            self._node.fence()
            self._versions = self._edits()

    def _edits(self) -> dict[str, int]:
        """Return how often each parameter was edited in place; {} if that can't be known. Local."""
        return dict(self._replica.versions()) if self._replica.versions else {}

    def begin_change(self) -> None:
        """As Owners.begin_change: other ranks may write into the shared segment before this rank does."""
        self.begin_batch()
        self._changing = True

    def synchronize_state(self) -> None:
        """As Owners.synchronize_state: wait for the ranks of the node, then back up the slices. Collective."""
        self.fence()
        self._since = self._steps
        self._back_up(self._steps)
        self._changing = False

    @property
    def shares_parameters(self) -> bool:  # type: ignore[override]
        """Whether the ranks of a node share one copy of the parameters."""
        return bool(self._node.arrays)

    def check_edits(self) -> None:
        """Raise ArgumentError, on this rank only, if parameters that ranks share were edited in place. Local."""
        if not self._node.arrays or not self._versions:
            return
        if name := next((name for name, edits in self._edits().items() if edits != self._versions.get(name)), ""):
            remedy = "load the model again, and edit it by trainer.edit(function)"
            raise ArgumentError(EDITED_IN_PLACE.format(name, remedy))

    def not_replicated(self) -> dict[str, str]:
        """As Owners.not_replicated."""
        reasons = dict.fromkeys(sliced_entries(self._replica), "each rank holds only its own slice")
        if self._node.arrays and self._backend.topology.nodes == 1:
            reasons["parameters"] = "the ranks share one copy"
        return reasons

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `state` with every array of `elementwise` gathered from the ranks that own its slices. Collective."""
        result, world = dict(state), self._backend.topology.world  # `close` has freed the group's communicator
        for name in sliced_entries(self._replica):
            array = result[name]
            # Between two steps the gradient buffer is free: use it as workspace.
            fits = array.dtype == self._buffer.dtype and not gpu.is_gpu_array(self._buffer)
            zeros = partial(np.zeros, self._buffer.size, array.dtype)
            gathered = self._buffer if fits else together(world, zeros)
            for part in slices_of(clipped(self._part, 0, array.size)):
                gathered[part] = array[part]
            self._share.collect(gathered)
            self._backend.all_gather(gathered)
            result[name] = together(world, gathered[: array.size].copy)
        return result

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        """As StepOwners.snapshot. Slices are received directly into rank 0's arrays. Collective."""
        replica, names = self._replica, sliced_entries(self._replica)
        state = together(self._comm, lambda: snapshot_of(replica, memory, without=names) if wanted else {})
        for name in names:
            own = together(self._comm, partial(self._elements, name, memory, state))
            to_root(self._comm, own, slices_of(clipped(self._part, 0, replica.parameter_count)), state.get(name))
        return state

    def _elements(self, name: str, memory: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> np.ndarray:
        """Return this rank's part of an entry. If `state` holds the parameters, add memory for the whole entry to it.
        Local."""
        own = elements_of(self._replica, name, self._part)
        if "parameters" in state:
            state[name] = reserved(memory, name, state["parameters"].shape, own.dtype)
        return own

    def close(self) -> None:
        """As StepOwners.close; frees the shared segment. Collective."""
        state = self.gather_state(self._replica.state())
        self._leave()
        self._replica.load_state(state)
        del state  # may hold views of the segment
        if self._messages is not None:
            self._backend.topology.release(self._messages)
        self._free()

    def abandon(self) -> None:
        """Move the replica's parameters into memory of its own, without gathering the slices of other ranks. Local."""
        self._leave()
        self._array, self._buffer = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._node.free()
        self._backup, self._messages, self._share = None, None, Share(())

    def _leave(self) -> None:
        """Move the replica's parameters into memory of its own. Local."""
        bind_own(self._replica)

    def _free(self) -> None:
        """Drop the parameters' memory. Local."""
        self._array = np.empty(0, np.uint8)
        self._node.free()
