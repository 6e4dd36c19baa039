"""A rank is lost: the optimizers of those that are left are made again, with the state of who has done most steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch.nn import Module
from torch.optim import Optimizer

from allreduce import notices
from allreduce.errors import RankLostError
from allreduce.messages import losses
from allreduce.messages.agreement import all_values
from allreduce.topology import Topology
from trainers.pytorch.broadcast import broadcast_tensors, state_of
from trainers.pytorch.family import Family
from trainers.pytorch.twins import Whole, collect

if TYPE_CHECKING:
    from trainers.pytorch.optimizer import MirroredOptimizer

Commit = Callable[[], object]


@contextmanager
def surviving(family: Family) -> Iterator[None]:
    """Inside, a lost rank has all optimizers of the family made again, and is raised as a RankLostError. Collective.

    Where MPI lets ranks be outlived (ULFM); otherwise nothing is changed.
    """
    try:
        yield
    except Exception as error:
        if losses.lost(error) is None or family.buried:  # buried: raised where it was recovered from, further inside
            raise
        for topology in family.topologies():
            topology.revoke()  # so that all ranks that wait come out
        family.topology.finished(False)
        raise recover(family) from error


def said(topology: Topology) -> None:
    """Say what happens to ranks that are lost, when that is not that the job ends."""
    if losses.in_force() and topology.size > 1:
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
        if losses.lost(error) is None:
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
        commits.append(_state(comm, member.model, member.optimizer, root))
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


def _state(comm: MPI.Intracomm, model: Module, optimizer: Optimizer, root: int) -> Commit:
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
