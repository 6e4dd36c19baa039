"""The sharded update: every rank updates only its share of the parameters: slices, or whole tensors.

reduce_scatter -> an optimizer of the user's class on the share -> `ShardedParameters.share`. The optimizer state exists
once, divided among the ranks. `trainers.state.sharded` divides; here are PyTorch's views of the parts, and their state.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce.elastic.retry import Commit
from allreduce.errors import OptionError
from allreduce.transport.control import all_values, raise_together
from trainers.pytorch.buckets import Gradient, allocate_flat, changed
from trainers.pytorch.owners import Closure, TorchOwners, flat, rates_of, square
from trainers.pytorch.reducer import SCATTERED
from trainers.pytorch.rows import combined
from trainers.replica import Slices
from trainers.replicas.pytorch import fused
from trainers.replicas.pytorch.blocks import Blocks, held_by, largest_block
from trainers.replicas.pytorch.tensors import Placed, shaped, version_of
from trainers.replicas.pytorch.values import pack, unpack
from trainers.state.adopt import Arrays, Piece, fetch_pieces, select_newest
from trainers.state.sharded import ShardedParameters
from trainers.strategies.rule import sum_over_ranks

PARAMETER = ""  # the name of a parameter among the tensors of its state, in a piece
DATA = "data"  # the only array of a piece: its blocks, packed
EDITING = "edit parameters inside of `with optimizer.editing():`, which copies rank 0's to all ranks"

FullState = tuple[int, list[dict[str, Any]]]  # after how many steps; of each parameter, perhaps with its value


class ShardedOptimizer(TorchOwners):
    """Updates this rank's blocks of the parameters, which it has moved into flat memory: slices, or with
    `reducer.tensors` whole tensors.

    given: the arguments of TorchOwners. The hyperparameters of `plain` are used; it has the state only of parameters
        that are frozen or have sparse gradients. copies: see ShardedParameters.

    Every rank updates all parameters with sparse gradients, which are in no bucket.
    """

    kind = "sharded"

    def __init__(self, *given: Any, copies: int) -> None:
        super().__init__(*given)
        plain, reducer, backend, comm = self.plain, self.reducer, self.reducer.backend, self.reducer.comm
        self._tensors = tensors = reducer.tensors
        self.replace_kernels()
        group_of = {id(each): at for at, group in enumerate(plain.param_groups) for each in group["params"]}
        self._groups = [group_of[id(each)] for each in reducer.parameters]
        self.sparse_parameters = {bucket.name: bucket.parameter for bucket in reducer.sparse}  # updated by every rank
        allocate = partial(allocate_flat, backend, device=reducer.device)
        versions = partial(_versions, reducer.gradients)
        shares, device = [bucket.share for bucket in reducer.dense], reducer.device.kind
        self.shards = ShardedParameters(backend, comm, reducer.plan, shares, allocate, device, versions, copies)
        flats = {dtype: memory.tensor for dtype, memory in self.shards.flats.items()}
        self._placed = Placed(reducer.parameters, [each.view_of(flats) for each in reducer.gradients])
        self._writes = not self.shards.shared or backend.topology.node_rank == 0
        self._move_in()
        most = largest_block(device, tensors)
        self._held = held_by(reducer.plan, [share.parts for share in shares], self.shards.cuts, most)
        self.blocks = Blocks(plain, reducer.parameters, self._held, flats, reducer.flats, tensors=tensors)
        self.optimizer = self.blocks.optimizer
        self._error: Exception | None = None  # of a transform in this step
        self._updated: set[int] = set()  # indices of parameters that any rank has updated before
        self._dtypes: list[set[torch.dtype]] = [set() for _ in plain.param_groups]  # of the averaged parameters
        for group, parameter in zip(self._groups, reducer.parameters, strict=True):
            self._dtypes[group].add(parameter.dtype)
        self.load()
        self.keep(reducer.steps)

    def _move_in(self) -> None:
        """Move the parameters, which are equal on all ranks, into flat memory. Collective.

        Raises an OptionError on all ranks, before anything is changed, if the dtype or shape of one has changed.
        """
        error = None
        for gradient, view in zip(self.reducer.gradients, self._placed.views, strict=True):
            parameter = gradient.parameter
            if parameter.dtype != view.dtype or parameter.shape != view.shape:
                error = error or OptionError(changed(gradient.name, parameter, tuple(view.shape), view.dtype))
        raise_together(self.reducer.comm, error)
        self.shards.fence()  # no rank reads the memory any more
        self._placed.enter(copies=self._writes)
        self.shards.fence()
        self.shards.accept_edits()

    def _fused_option(self, at: int, begun: bool) -> dict[str, Any]:
        """Return {"fused": True} if the user named no implementation, the fused one is right, and all states exist.

        at: the number of the group. begun: whether the states exist on all ranks. All ranks must select alike, because
        the two implementations differ in the last bits.
        """
        group, parts = self.plain.param_groups[at], self.optimizer.param_groups[at]["params"]
        free = all(group.get(key) is None for key in ("fused", "foreach"))
        plain = not any(group.get(key) for key in ("differentiable", "capturable"))
        numbers = not any(isinstance(value, Tensor) for key, value in group.items() if key != "params")
        on_host = self.reducer.device.kind == "cpu"  # on a GPU fused updates have other states
        free &= not self._tensors  # which get the bits of the replicated update
        if not (type(self.plain) in fused.KINDS and free and plain and numbers and on_host):
            return {}
        begun &= self._dtypes[at] <= fused.RIGHT
        states = [self.optimizer.state.get(part) for part in parts if part.grad is not None]
        begun &= all(state and all(value is not None for value in state.values()) for state in states)
        return {"fused": begun or None}

    def _step_with(self, closure: Closure | None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.apply()
        return loss

    def _follow(self) -> None:
        self.apply()

    def _catch_up(self, mine: int) -> None:
        """Do nothing: every rank has updated its part in each step."""

    def transform(self) -> None:
        """As Owners.transform. An error is kept for `update`, in which the ranks agree. Collective."""
        self._error = self._changed_by(self.transforms)

    def update(self) -> None:
        """Update this rank's blocks, from gradients that are averaged at least there. Collective."""
        reducer = self.reducer
        moved = [reducer.gradients[number].name for number in self._placed.left()]
        call = f"updates parameters with lr {rates_of(self.plain)}"
        if moved:
            call += f" after {', '.join(moved)} got other memory"
        begin = partial(self._begin_update, bool(moved), self._error or reducer.take_edits())
        used = self._agreed(call, begin)
        with reducer.clock.span("update"):
            self.update_blocks(used)

    def _begin_update(self, moved: bool, error: Exception | None) -> np.ndarray:
        """Check that all ranks may update. Returns, for each parameter, whether any rank has a gradient of it.

        Runs in the queue; after it, no rank reads the parameters until they are shared. Raises on all ranks if
        parameters that the ranks of a node share were edited in place.

        moved: whether parameters left the flat memory (the same on all ranks); they are moved back. error: why this
            rank can't update; raised on all ranks.
        """
        if moved:
            self._move_in()
        if error is None and (text := self.shards.edit_error(EDITING)):
            error = OptionError(text)
        used = [each.grad is not None for each in self.reducer.parameters]
        return combined(self.reducer.comm, np.array([0, *used], np.uint8), error, "begin an update")

    def share(self) -> None:
        reducer = self.reducer
        with reducer.clock.span("wait" if self.shards.shared else "reduce"):
            reducer.run_in_queue("shares parameters", self.shards.share)
        if self.sparse_parameters:
            for parameter in reducer.parameters:
                parameter.grad = None  # already updated in slices
            with reducer.clock.span("update"):
                self.plain.step()
        if self.shards.backup is not None:
            work = partial(self.keep, reducer.steps + 1)  # `end_step` counts this step later
            with reducer.clock.span("reduce"):
                reducer.run_in_queue("backs up slices", work)

    def synchronize(self) -> None:
        self.reduce()
        reducer = self.reducer
        if reducer.state == SCATTERED:
            with reducer.clock.span("reduce"):
                reducer.run_in_queue("gathers gradients", reducer.gather, reads=True)

    def _dense_squares(self) -> float:
        reducer = self.reducer
        if reducer.state != SCATTERED:
            return super()._dense_squares()
        own = sum(map(square, self._dense())) if self.shards.tells else 0.0
        add = partial(sum_over_ranks, reducer.comm, own)
        with reducer.clock.span("reduce"):
            return reducer.run_in_queue("adds up squares of gradients", add, reads=True)

    def _dense(self) -> list[Tensor]:
        if self.reducer.state != SCATTERED:
            return super()._dense()
        given = zip(self._held, self.blocks.grads, strict=True)
        return [flat(grad) for each, own in given if self.reducer.averaged(each.parameter) for grad in own]  # no gaps

    def _part(self) -> Slices | None:
        if self.reducer.state != SCATTERED:
            return None
        held = [each for each in self._held if self.reducer.averaged(each.parameter)]
        begins = [(each.start - each.blocks[0].start, block) for each in held for block in each.blocks]
        return tuple(slice(begin + block.start, begin + block.stop) for begin, block in begins)

    def set_steps(self, steps: int) -> None:
        self.shards.extend(steps)

    def begin_change(self) -> None:
        self._placed.leave()

    def synchronize_state(self) -> None:
        """Move parameters that were copied to all ranks into flat memory; back them up. Collective, in the queue."""
        self._move_in()
        self.keep(self.reducer.steps)

    def _replicated(self) -> tuple[Mapping[str, Any], Mapping[str, Parameter]]:
        # a rank has the state of its own part only
        return (self.sparse_parameters if self.shards.one_copy else self.trained), self.sparse_parameters

    def keep(self, step: int) -> None:
        """Back up this rank's slices as the state after `step` steps. Runs in the queue."""
        if self.shards.backup is not None:
            numbers = range(len(self._held))
            self.shards.backup.keep(step, lambda memory: [self._piece(each, True, memory) for each in numbers])

    def update_blocks(self, used: np.ndarray) -> None:
        """Update this rank's blocks. Local.

        used: for each parameter, whether any rank has a gradient; the other parameters are not changed.
        """
        now = {int(index) for index in np.flatnonzero(used)}
        new = {self._groups[index] for index in now - self._updated}
        self.replace_kernels()  # a loaded state may have set fused=True again
        self.blocks.step(used, lambda at: self._fused_option(at, begun=at not in new))
        self._updated |= now

    def abandon(self) -> None:
        """Move the parameters back into memory of this rank, and drop the state. Local."""
        self.blocks.clear()  # they lie in the flat memory
        self._placed.leave()
        self._placed.views.clear()
        self.shards.free()

    # State, in the format of the plain optimizer

    def gather_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, the plain optimizer's state_dict, with the parts of all ranks. Collective."""
        return self.reducer.run_in_queue("gathers the optimizer's state", partial(self._gathered, state))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        super().load_state_dict(state)
        self.load()
        self.reducer.run_in_queue("backs up slices", partial(self.keep, self.reducer.steps))

    def _gathered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """As `gather_state`. Runs in the queue.

        Besides the result a rank needs memory for the state of one parameter: pieces are packed and sent one by one.
        """
        pieces = [Piece(0, 0, each.start, each.stop, {}, {}) for each in self._held]
        whole = self._assembled(self.reducer.comm, pieces, partial(self._piece, with_parameters=False))
        assert whole is not None
        return self._filled(state, whole[1])

    def _piece(self, number: int, with_parameters: bool, memory: Arrays | None = None) -> Piece:
        """Pack one of `_held` into a piece: the parameter, and [offset, values] of each block. Local.

        with_parameters: the values are the optimizer's state and the parameters, else the state alone. memory: where
            the bytes are kept; see trainers.replica.snapshot_of.
        """
        held, entries = self._held[number], []
        for block, part in zip(held.blocks, self.blocks.parts[number], strict=True):
            parameter = {PARAMETER: part.detach()} if with_parameters else {}
            offset = held.offset + block.start - held.blocks[0].start
            entries.append([offset, parameter | self.optimizer.state.get(part, {})])
        data = pack([held.parameter, entries], memory=memory, name=f"{DATA} from {held.start}")
        return Piece(0, 0, held.start, held.stop, {}, {DATA: data})

    @torch.no_grad()
    def _assembled(self, comm: MPI.Intracomm, pieces: list[Piece], piece: Callable[[int], Piece]) -> FullState | None:
        """Return the newest state that the pieces of all ranks cover, or None. Collective.

        piece: piece(index) returns a piece of this rank with its content, when it is to be sent.
        """
        length = sum(bucket.stop - bucket.start for bucket in self.reducer.plan)
        selection = select_newest(comm, pieces, length)
        if selection is None:
            return None
        parameters = self.reducer.parameters
        state: list[dict[str, Any]] = [{} for _ in parameters]
        for found in fetch_pieces(comm, selection, piece):
            at, blocks = unpack(found.rest[DATA])[0]
            for offset, values in blocks:
                if self._tensors:
                    state[at] = {key: as_state(value, parameters[at]) for key, value in values.items()}
                else:
                    _add_slices(state[at], values, offset, parameters[at].numel())
        if not self._tensors:
            for own, parameter in zip(state, parameters, strict=True):
                sliced = {key: value for key, value in own.items() if isinstance(value, Tensor) and value.dim()}
                own |= {key: shaped(value, 0, parameter).to(parameter.device) for key, value in sliced.items()}
        return selection.step, state

    def newest(self, comm: MPI.Intracomm) -> Commit:
        load, state = super().newest(comm), self.backed_up(comm)

        @torch.no_grad()
        def commit() -> None:
            load()
            self.lost = state is None
            if state is None:
                return
            self.recovered, (self.reducer.steps, found) = state, state
            for parameter, own in zip(self.reducer.parameters, found, strict=True):
                parameter.copy_(own.get(PARAMETER, parameter))
            self.plain.load_state_dict(self._filled(self.plain.state_dict(), found))

        return commit

    def backed_up(self, comm: MPI.Intracomm) -> FullState | None:
        """Return the complete state from the parts and backups of all ranks, or None. Collective."""
        if any(all_values(comm, self.recovered is not None, "continue without a failed rank")):
            return self.recovered  # all ranks loaded it before a second failure, so all have it
        if self.shards.backup is None:
            return None
        pieces = self.shards.backup.pieces()
        return self._assembled(comm, pieces, pieces.__getitem__)

    def _filled(self, state: Mapping[str, Any], gathered: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the plain optimizer's state_dict with `gathered` as the state of the sharded parameters. Local."""
        numbers = {
            parameter: number
            for packed, group in zip(state["param_groups"], self.plain.param_groups, strict=True)
            for number, parameter in zip(packed["params"], group["params"], strict=True)
        }
        held = [(numbers[each], own) for each, own in zip(self.reducer.parameters, gathered, strict=True)]
        held = [(number, {key: own[key] for key in own if key != PARAMETER}) for number, own in held]
        found = [*state["state"].items(), *(each for each in held if each[1])]
        return {**state, "state": dict(sorted(found, key=lambda each: each[0]))}

    def load(self) -> None:
        """Take the sharded parameters' state out of the user's optimizer, and keep this rank's slices of it. Local."""
        self._updated = {at for at, each in enumerate(self.reducer.parameters) if self.plain.state.get(each)}
        self.blocks.load()


def _versions(gradients: Sequence[Gradient]) -> dict[str, int]:
    return {each.name: version_of(each.parameter) for each in gradients}


def _add_slices(state: dict[str, Any], values: dict[str, Any], offset: int, length: int) -> None:
    """Add the elements from `offset` on to the flat state of a parameter with `length` elements; numbers as they are.
    Local."""
    for key, value in values.items():
        if not isinstance(value, Tensor) or not value.dim():
            state[key] = value
            continue
        if key not in state:
            state[key] = torch.empty(length, dtype=value.dtype)
        state[key][offset : offset + value.numel()] = value


def as_state(value: Any, parameter: Tensor) -> Any:
    """Return a received entry of a parameter's state: its tensors on the parameter's device, except for numbers."""
    if isinstance(value, Tensor) and value.dim():
        there = torch.empty_like(parameter, dtype=value.dtype) if value.shape == parameter.shape else None
        return value.to(parameter.device) if there is None else there.copy_(value)
    if isinstance(value, dict):
        return {key: as_state(each, parameter) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_state(each, parameter) for each in value)
    return value
