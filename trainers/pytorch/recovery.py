"""Recovery: after a failure the remaining ranks create their MirroredOptimizers again, with their newest state.

Replicated parameters and state come from a rank that has done the most steps. Those of a sharded update come from the
pieces of all ranks and their backups (copies=2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from allreduce import notices
from allreduce.elastic.retry import Commit, recover, retry
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from allreduce.transport import processes, ulfm
from allreduce.transport.control import all_values
from trainers.pytorch.optimizer_group import OptimizerGroup


@contextmanager
def surviving(group: OptimizerGroup) -> Iterator[None]:
    """Context manager: when a rank fails, create the group's optimizers again, and raise a RankLostError. Collective.

    Only where MPI lets jobs continue without a rank (ULFM); otherwise the error is raised as it is.
    """
    try:
        yield
    except Exception as error:
        if ulfm.lost(error) is None or group.replaced:  # replaced: an inner block has recovered already
            raise
        group.revoke()  # ends the waits of all other ranks
        group.topology.finished(False)
        raise regroup(group) from error


def announce_policy(topology: Topology) -> None:
    """Notify once what happens when ranks fail, if the job survives that."""
    if ulfm.in_force() and topology.size > 1:
        text = "failed ranks (ULFM): MirroredOptimizer continues on the remaining ranks, and raises RankLostError"
        notices.once(topology.rank, text)


def regroup(group: OptimizerGroup) -> RankLostError:
    """Create the optimizers of a group again on the remaining ranks. Returns the error that reports the failure.

    Collective over the remaining ranks, which have agreed that a rank has failed (Topology.finished).
    """
    members = {number: member for number, member in sorted(group.members.items()) if not member.closed}
    before = processes.world_ranks(group.topology.world)  # asked now: the recovery frees this communicator
    newest = partial(recover, repair=partial(_newest_states, members))
    successor = retry(newest(group.topology), partial(_rebuilt, members), newest)
    left = processes.world_ranks(successor.topology.world)
    group.replace(successor)
    failed = tuple(rank for rank, number in enumerate(before) if number not in left)
    error = _error_of(failed, len(before), members)
    for member in members.values():
        member.owners.kept.recovered = None
    return error


def _newest_states(members: dict[int, Any], topology: Topology) -> Commit:
    """Receive the newest state of each optimizer. Returns a function that loads these states, locally. Collective.

    Nothing is changed before that function runs. Otherwise a rank would have neither the old nor the new state if the
    sender failed halfway.
    """
    comm = topology.private()
    everyone = all_values(comm, sorted(members), "continue without a failed rank")
    commits: list[Commit] = []
    for number, member in sorted(members.items()):
        on_all = all(number in numbers for numbers in everyone)
        commits.append(member.owners.newest(comm) if on_all else member.drop)
    topology.release(comm)
    return lambda: [commit() for commit in commits]


def _rebuilt(members: dict[int, Any], topology: Topology) -> OptimizerGroup:
    """Return a new group with all members created again. Collective; can be called again for the same members."""
    group = OptimizerGroup(topology)
    for _, member in sorted(members.items()):
        if not member.closed:
            member.rebuild(group)
    return group


def _error_of(failed: tuple[int, ...], size: int, members: dict[int, Any]) -> RankLostError:
    """The error that reports the failed ranks. size: the number of ranks before the failure."""
    ranks, left = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} of {size}", size - len(failed)
    steps = max((each.owners.steps for each in members.values()), default=0)
    text = f"{ranks} failed; {left} continue{'s' * (left == 1)} after step {steps}"
    if any(each.owners.kept.lost for each in members.values()):
        text += ". Slices of a sharded update are lost: load model and optimizer from the last checkpoint"
    error = RankLostError(text)
    error.lost = failed
    return error
