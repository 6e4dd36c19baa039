"""A rank is lost: the optimizers of those that are left are made again, with the state of who has done most steps."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from allreduce import notices
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.chunked import broadcast, pieces
from allreduce.transport.control import all_values, root_value
from allreduce.transport.deferred_free import keep
from allreduce.transport.wait import wait_for
from trainers.pytorch.optimizer_group import Family
from trainers.pytorch.state import broadcast_tensors, from_json, state_of, to_json
from trainers.replicas.pytorch.tensors import as_bytes, shaped
from trainers.state.backup import KEEPS, NEVER, TAG, keepers

if TYPE_CHECKING:
    from trainers.pytorch.optimizer import MirroredOptimizer
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


Commit = Callable[[], object]


@contextmanager
def surviving(family: Family) -> Iterator[None]:
    """Inside, a lost rank has all optimizers of the family made again, and is raised as a RankLostError. Collective.

    Where MPI lets ranks be outlived (ULFM); otherwise nothing is changed.
    """
    try:
        yield
    except Exception as error:
        if ulfm.lost(error) is None or family.buried:  # buried: raised where it was recovered from, further inside
            raise
        for topology in family.topologies():
            topology.revoke()  # so that all ranks that wait come out
        family.topology.finished(False)
        raise recover(family) from error


def said(topology: Topology) -> None:
    """Say what happens to ranks that are lost, when that is not that the job ends."""
    if ulfm.in_force() and topology.size > 1:
        text = "lost ranks (ULFM): MirroredOptimizer goes on with those that are left, and raises RankLostError"
        notices.once(topology.rank, text)


def recover(family: Family) -> RankLostError:
    """Make the optimizers of a family again on the ranks that are left; what these are told of.

    Collective over all that are left, who have agreed that somebody was lost (Topology.finished). When another is lost
    meanwhile, all of it begins again.
    """
    members = {number: member for number, member in sorted(family.owners.items()) if not member.closed}
    left, former = family.topology, list(range(family.topology.size))
    while True:
        left = left.survivors()
        former = [former[rank] for rank in left.former]
        commits = _attempt(left, partial(_take, left, members))
        if not left.finished(commits is not None):
            continue
        for commit in commits or []:
            commit()
        made = _attempt(left, partial(_make_again, left, members))
        if left.finished(made is not None):
            break
    family.bury(made)
    error = _told(family.topology.size, former, members)
    for member in members.values():
        member.kept_twice, member.whole = member.whole is not None, None
    return error


def _attempt(topology: Topology, work: Callable[[], Any]) -> Any:
    """What `work` returns; None when a rank was lost meanwhile."""
    try:
        return work()
    except Exception as error:
        if ulfm.lost(error) is None:
            raise
        topology.revoke()
        return None


def _take(topology: Topology, members: "dict[int, MirroredOptimizer]") -> list[Commit]:
    """What gives each optimizer the state of the rank that has done most of its steps, in a moment. Collective.

    Nothing is changed yet: whoever had taken half of it, and then lost the rank that it came from, would have nothing.
    """
    comm = topology.private()
    commits: list[Commit] = []
    everyone = all_values(comm, sorted(members), "go on without a lost rank")
    for number in sorted(members):
        member = members[number]
        if not all(number in numbers for numbers in everyone):
            commits.append(member._drop)  # another rank has no such optimizer any more
            continue
        steps = all_values(comm, member.steps, "go on without a lost rank")
        root = steps.index(max(steps))
        commits.append(_state_of_root(comm, member.model, member.optimizer, root))
        commits.append(partial(setattr, member._averager, "steps", max(steps)))
        if (whole := _slices(comm, member)) is not None:
            commits.append(partial(member._take_whole, whole))
    topology.release(comm)
    return commits


def _slices(comm: MPI.Intracomm, member: "MirroredOptimizer") -> Whole | None:
    """What the ranks that are left have of a sharded update whose slices are kept twice, if it is all. Collective."""
    if any(all_values(comm, member.whole is not None, "go on without a lost rank")):
        return member.whole  # on all of them, since all have made it their own before another one was lost
    if member._sharded is None or member._sharded.twins is None:
        return None
    return collect(comm, member._sharded.twins, member._averager.parameters)


def _state_of_root(comm: MPI.Intracomm, model: Module, optimizer: Optimizer, root: int) -> Commit:
    """What takes on the root's parameters, buffers and optimizer state. Collective."""
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

    return commit


def _make_again(topology: Topology, members: "dict[int, MirroredOptimizer]") -> Family:
    """Collective; may be called again for the same members."""
    family = Family.of(topology)
    for number in sorted(members):
        if not members[number].closed:
            members[number]._reconnect(family)
    return family


def _told(size: int, former: list[int], members: "dict[int, MirroredOptimizer]") -> RankLostError:
    lost = tuple(rank for rank in range(size) if rank not in former)
    ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {size}"
    be = "were" if len(lost) > 1 else "was"
    steps = max((each.steps for each in members.values()), default=0)
    text = f"{ranks} {be} lost; {len(former)} go{'es' * (len(former) == 1)} on, after step {steps}"
    if any(each.update == "sharded" and each.whole is None for each in members.values()):
        text += ". The lost slices of a sharded update are gone: load model and optimizer from the last checkpoint"
    error = RankLostError(text)
    error.lost = lost
    return error
