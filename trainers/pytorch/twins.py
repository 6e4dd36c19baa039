"""Second copies of the slices of a sharded update: after each step another rank gets what the optimizer has of a slice.

As in trainers.twins, of one's own slice and another's there are copies of two steps: a rank that updates has met all
others since they had the copies of the step before.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from allreduce.messages.agreement import all_values, root_value, wait_for
from allreduce.messages.kept import keep
from allreduce.messages.parcels import broadcast, pieces
from allreduce.topology import Topology
from trainers.pytorch.plain import from_json, to_json
from trainers.replicas.pytorch.tensors import as_bytes, shaped
from trainers.twins import KEEPS, NEVER, TAG, keepers

if TYPE_CHECKING:
    from trainers.pytorch.sharded import ShardedOptimizer

Owned = Sequence[Sequence[slice]]  # of each rank for each bucket


class Copy(NamedTuple):
    """One rank's slices. text: JSON, of what `values`, the bytes of all tensors, are."""

    text: str
    values: np.ndarray


class Kept:
    """The copies of one state, which is good for steps `first` to `last`, by the ranks whose slices they are."""

    def __init__(self) -> None:
        self.first = self.last = NEVER
        self.copies: dict[int, Copy] = {}
        self.memory = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # of this rank's slices, and the other's


class Twins:
    """Creating and `keep` are collective, and run in the lane. owned: of all ranks."""

    def __init__(self, sharded: "ShardedOptimizer", owned: Owned, topology: Topology, comm: MPI.Intracomm) -> None:
        self._sharded, self._comm = sharded, comm
        self.owned = owned
        self.sizes = [bucket.stop - bucket.start for bucket in sharded.averager.plan]
        keeper = keepers(all_values(comm, topology.node_index, KEEPS))
        all_owned = sum(part.stop - part.start for of_rank in owned for part in of_rank)
        alone = all_owned < 2 * sum(self.sizes)  # or nodes have the same slices, and nothing is sent
        self._keeper = keeper[comm.rank] if alone else MPI.PROC_NULL
        self._ward = keeper.index(comm.rank) if alone else MPI.PROC_NULL
        self._before, self._now = Kept(), Kept()

    def keep(self, step: int) -> None:
        """All ranks have come to this step: have each slice kept."""
        self._before, self._now = self._now, self._before
        now = self._now
        own = self._packed(now)
        now.copies = {self._comm.rank: own}
        now.first = now.last = step
        if self._keeper == MPI.PROC_NULL:
            return
        text = np.frombuffer(own.text.encode(), np.uint8)
        sizes = np.empty(2, np.int64)
        self._swap([np.array([text.size, own.values.size])], [sizes])
        there, now.memory[1] = np.empty(sizes[0], np.uint8), _sized(now.memory[1], int(sizes[1]))
        self._swap([text, own.values], [there, now.memory[1]])
        now.copies[self._ward] = Copy(there.tobytes().decode(), now.memory[1])

    def _swap(self, own: list[np.ndarray], other: list[np.ndarray]) -> None:
        requests = [self._comm.Irecv(piece, self._ward, TAG) for array in other for piece in pieces(array)]
        requests += [self._comm.Isend(piece, self._keeper, TAG) for array in own for piece in pieces(array)]
        try:
            for request in requests:
                wait_for(self._comm, request, KEEPS)
        except BaseException:
            for request in requests:
                keep(request)
            raise

    def _packed(self, now: Kept) -> Copy:
        entries, tensors = [], []
        for piece, part, state in self._sharded.held():
            large = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
            rest = {key: value.dtype if key in large else value for key, value in state.items()}
            entries.append([piece.parameter, piece.offset, part.numel(), rest])
            tensors += [part, *large.values()]
        parts = [as_bytes(each.contiguous()) for each in tensors]
        now.memory[0] = _sized(now.memory[0], sum(part.size for part in parts))
        if parts:
            np.concatenate(parts, out=now.memory[0])
        return Copy(json.dumps(to_json(entries)), now.memory[0])

    def left_out(self) -> None:
        """All ranks have left the next step out. Local."""
        self._now.last += 1

    def count_from(self, steps: int) -> None:
        """So many steps were taken before the first copies. Local."""
        self._now.first = self._now.last = steps

    def offers(self) -> list[tuple[int, int, list[int]]]:
        """The steps that this rank's copies are good for, and whose slices they are. Local."""
        return [(kept.first, kept.last, list(kept.copies)) for kept in (self._now, self._before) if kept.first != NEVER]

    def copy(self, step: int, owner: int) -> Copy:
        """One of those. Local."""
        return next(
            kept.copies[owner] for kept in (self._now, self._before) if kept.first == step and owner in kept.copies
        )


class Whole(NamedTuple):
    """All parameters and all state of an optimizer, after `steps` steps; the state by the parameters' numbers."""

    steps: int
    parameters: list[Tensor]
    state: list[dict[str, Any]]


def collect(comm: MPI.Intracomm, twins: Twins, like: list[torch.nn.Parameter]) -> Whole | None:
    """What the ranks that are left put together of the newest step whose copies are all there; or None. Collective."""
    sides = all_values(comm, twins.offers(), "put the slices of a sharded update together")
    offers = [[tuple(offer) for offer in side] for side in sides]
    for step in sorted({first for side in offers for first, *_ in side}, reverse=True):
        holders = {
            owner: rank for rank, side in enumerate(offers) for first, _, owners in side if first == step
            for owner in owners
        }  # fmt: skip
        if covers([twins.owned[owner] for owner in holders], twins.sizes):
            last = max(last for side in offers for first, last, _ in side if first == step)
            return _joined(comm, twins, like, step, last, holders)
    return None


def covers(owned: Sequence[Sequence[slice]], sizes: Sequence[int]) -> bool:
    """Whether these slices make up all buckets."""
    for at, size in enumerate(sizes):
        end = 0
        for part in sorted((each[at] for each in owned), key=lambda part: part.start):
            end = max(end, part.stop) if part.start <= end else end
        if end < size:
            return False
    return True


def _joined(
    comm: MPI.Intracomm, twins: Twins, like: list[torch.nn.Parameter], step: int, steps: int, holders: dict[int, int]
) -> Whole:
    flats = [torch.empty(each.numel(), dtype=each.dtype) for each in like]
    states: list[dict[str, Any]] = [{} for _ in like]
    for owner, holder in sorted(holders.items()):
        mine = comm.rank == holder
        copy = twins.copy(step, owner) if mine else Copy("", np.empty(0, np.uint8))
        what = "put the slices of a sharded update together"
        text, size = root_value(comm, [copy.text, copy.values.size], what, holder)
        values = copy.values if mine else np.empty(size, np.uint8)
        broadcast(comm, [values], holder, what)
        _take_apart(from_json(json.loads(text)), torch.from_numpy(values), flats, states)
    parameters = [shaped(flat, 0, each).clone() for flat, each in zip(flats, like, strict=True)]
    for state, each in zip(states, like, strict=True):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[key] = shaped(value, 0, each).clone(memory_format=torch.preserve_format)
    return Whole(steps, parameters, states)


def _take_apart(entries: list[Any], values: Tensor, flats: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Put one rank's slices to their places."""
    begin = 0

    def take(target: Tensor) -> None:
        nonlocal begin
        stop = begin + target.numel() * target.element_size()
        as_tensor = torch.from_numpy(as_bytes(target))
        as_tensor.copy_(values[begin:stop])
        begin = stop

    for parameter, offset, length, rest in entries:
        span = slice(offset, offset + length)
        take(flats[parameter][span])
        for key, value in rest.items():
            if isinstance(value, torch.dtype):
                whole = states[parameter].setdefault(key, torch.empty(flats[parameter].numel(), dtype=value))
                take(whole[span])
            else:
                states[parameter][key] = value


def _sized(memory: np.ndarray, size: int) -> np.ndarray:
    return memory if memory.size == size else np.empty(size, np.uint8)
