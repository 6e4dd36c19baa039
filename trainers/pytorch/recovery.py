"""When ranks are lost: the others make their MirroredOptimizers again, with the newest state that they have.

Replicated parameters and state come from a rank that has done the most steps. For those of a sharded update each rank
has a backup at another rank (copies=2): after each step it sends the optimizer's slices there. A rank updates only
after it has received every rank's gradients. A rank sends its gradients only after it has backed up the previous step.
So when any rank is at step s, every rank has a backup of step s - 1. That is why a backup has two steps of each slice.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from allreduce import notices
from allreduce.elastic.retry import Commit, recover, retry
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.chunked import broadcast, pieces
from allreduce.transport.control import all_values, root_value
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import wait_for
from trainers.pytorch.buckets import Block
from trainers.pytorch.optimizer_group import Member, OptimizerGroup
from trainers.pytorch.state import broadcast_tensors, from_json, state_of, to_json
from trainers.replicas.pytorch.tensors import as_bytes, shaped
from trainers.state.backup import BACKUP, NEVER, TAG, holders

ResultT = TypeVar("ResultT")
Owned = Sequence[Sequence[slice]]  # of each rank for each bucket


@contextmanager
def surviving(group: OptimizerGroup) -> Iterator[None]:
    """Inside, a lost rank has all optimizers of the group made again, and is raised as a RankLostError. Collective.

    Where MPI lets jobs go on without a rank (ULFM); otherwise nothing is changed.
    """
    try:
        yield
    except Exception as error:
        if ulfm.lost(error) is None or group.replaced:  # replaced: the recovery was further inside
            raise
        group.revoke()  # so that all ranks that wait come out
        group.topology.finished(False)
        raise regroup(group) from error


def tell_policy(topology: Topology) -> None:
    """Say what happens when ranks are lost, unless the job ends then."""
    if ulfm.in_force() and topology.size > 1:
        text = "lost ranks (ULFM): MirroredOptimizer goes on with those that are left, and raises RankLostError"
        notices.once(topology.rank, text)


def regroup(group: OptimizerGroup) -> RankLostError:
    """Make the optimizers of a group again on the ranks that are left. Returns the error that tells of the failure.

    Collective over all ranks that are left, which have agreed that a rank has failed (Topology.finished).
    """
    members = {number: member for number, member in sorted(group.members.items()) if not member.closed}
    newest = partial(recover, repair=partial(_newest_states, members))
    heir = retry(newest(group.topology), partial(_rebuilt, members), newest)
    before, left = group.topology, processes.world_ranks(heir.topology.world)
    group.replace(heir)
    lost = tuple(rank for rank, number in enumerate(processes.world_ranks(before.world)) if number not in left)
    error = _error_of(lost, before.size, members)
    for member in members.values():
        member.recovered()
    return error


def _newest_states(members: dict[int, Member], topology: Topology) -> Commit:
    """Get the newest state of each optimizer; the result takes the states on. Collective.

    Nothing is changed yet: a rank that had taken half of a state, and then lost the rank that it came from, would have
    neither state.
    """
    comm = topology.private()
    everyone = all_values(comm, sorted(members), "go on without a failed rank")
    commits: list[Commit] = []
    for number, member in sorted(members.items()):
        on_all = all(number in numbers for numbers in everyone)
        commits.append(member.newest_state(comm) if on_all else member.drop)
    topology.release(comm)
    return lambda: [commit() for commit in commits]


def _rebuilt(members: dict[int, Member], topology: Topology) -> OptimizerGroup:
    """A new group, with all members made again. Collective; may be called again for the same members."""
    group = OptimizerGroup(topology)
    for _, member in sorted(members.items()):
        if not member.closed:
            member.rebuild(group)
    return group


def _error_of(lost: tuple[int, ...], size: int, members: dict[int, Member]) -> RankLostError:
    """The error that tells of the lost ranks, of `size` ranks before."""
    ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {size}"
    be, left = "were" if len(lost) > 1 else "was", size - len(lost)
    steps = max((each.steps for each in members.values()), default=0)
    text = f"{ranks} {be} lost; {left} go{'es' * (left == 1)} on, after step {steps}"
    if any(each.slices_lost for each in members.values()):
        text += ". The lost slices of a sharded update are gone: load model and optimizer from the last checkpoint"
    error = RankLostError(text)
    error.lost = lost
    return error


def newest_replica(comm: MPI.Intracomm, model: Module, optimizer: Optimizer, steps: int) -> tuple[int, Commit]:
    """Get parameters, buffers and optimizer state of a rank that has done the most steps. Collective.

    Returns these steps, and what takes the state on.
    """
    everyone = all_values(comm, steps, "go on without a lost rank")
    root = everyone.index(max(everyone))
    takes = comm.rank != root
    own = [*model.parameters(), *model.buffers()]
    taken = [each.detach().clone() for each in own]
    broadcast_tensors(comm, taken, root)
    state = state_of(comm, optimizer, root)

    @torch.no_grad()
    def commit() -> None:
        for here, there in zip(own, taken, strict=True):
            here.copy_(there)
        if takes:
            optimizer.load_state_dict(state)

    return max(everyone), commit


class Copy(NamedTuple):
    """One rank's slices. values: the bytes of all tensors. text: JSON that describes them."""

    text: str
    values: np.ndarray


class Kept:
    """The copies of one state, which is good for steps `first` to `last`, by the ranks whose slices they are."""

    def __init__(self) -> None:
        self.first = self.last = NEVER
        self.copies: dict[int, Copy] = {}
        self.memory = [np.empty(0, np.uint8), np.empty(0, np.uint8)]  # of this rank's slices, and the other's


class Backup:
    """Keeps the slices of this rank and of another one, of two steps. Creating and `keep` are collective, in the queue.

    held: this rank's blocks, their parameters, and what the optimizer has for them. owned: of all ranks. sizes: of the
    buckets.
    """

    def __init__(
        self,
        held: Callable[[], Iterable[tuple[Block, Tensor, dict[str, Any]]]],
        owned: Owned,
        sizes: Sequence[int],
        topology: Topology,
        comm: MPI.Intracomm,
    ) -> None:
        self._held, self.owned, self.sizes, self._comm = held, owned, sizes, comm
        keeper = holders(all_values(comm, topology.node_index, BACKUP))
        all_owned = sum(part.stop - part.start for of_rank in owned for part in of_rank)
        alone = all_owned < 2 * sum(sizes)  # or nodes have the same slices, and nothing is sent
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
                wait_for(self._comm, request, BACKUP)
        except BaseException:
            for request in requests:
                free_later(request)
            raise

    def _packed(self, now: Kept) -> Copy:
        entries, tensors = [], []
        for block, part, state in self._held():
            large = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
            rest = {key: value.dtype if key in large else value for key, value in state.items()}
            entries.append([block.parameter, block.offset, part.numel(), rest])
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


def collect(comm: MPI.Intracomm, backup: Backup, like: list[torch.nn.Parameter]) -> Whole | None:
    """What the ranks that are left put together of the newest step whose copies are all there; or None. Collective."""
    sides = all_values(comm, backup.offers(), "put the slices of a sharded update together")
    offers = [[tuple(offer) for offer in side] for side in sides]
    for step in sorted({first for side in offers for first, *_ in side}, reverse=True):
        holders = {
            owner: rank for rank, side in enumerate(offers) for first, _, owners in side if first == step
            for owner in owners
        }  # fmt: skip
        if covers([backup.owned[owner] for owner in holders], backup.sizes):
            last = max(last for side in offers for first, last, _ in side if first == step)
            return _joined(comm, backup, like, step, last, holders)
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
    comm: MPI.Intracomm, backup: Backup, like: list[torch.nn.Parameter], step: int, steps: int, holders: dict[int, int]
) -> Whole:
    flats = [torch.empty(each.numel(), dtype=each.dtype) for each in like]
    states: list[dict[str, Any]] = [{} for _ in like]
    for owner, holder in sorted(holders.items()):
        mine = comm.rank == holder
        copy = backup.copy(step, owner) if mine else Copy("", np.empty(0, np.uint8))
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
