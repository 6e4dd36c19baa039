"""When ranks are lost: the others make their MirroredOptimizers again, with the newest state that they have.

Replicated parameters and state come from a rank that has done the most steps. Those of a sharded update come from the
pieces of all ranks and their backups (copies=2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from mpi4py import MPI
from torch.nn import Module
from torch.optim import Optimizer

from allreduce import notices
from allreduce.elastic.retry import Commit, recover, retry
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values
from trainers.pytorch.optimizer_group import Member, OptimizerGroup
from trainers.pytorch.state import broadcast_tensors, state_of

ResultT = TypeVar("ResultT")


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
    before = processes.world_ranks(group.topology.world)  # asked now: the recovery frees this communicator
    newest = partial(recover, repair=partial(_newest_states, members))
    heir = retry(newest(group.topology), partial(_rebuilt, members), newest)
    left = processes.world_ranks(heir.topology.world)
    group.replace(heir)
    lost = tuple(rank for rank, number in enumerate(before) if number not in left)
    error = _error_of(lost, len(before), members)
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
