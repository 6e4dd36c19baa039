"""The MirroredOptimizers on the same ranks: one worker runs the calls of all of them, and all survive a failed rank."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.call.queue import Queue, Worker
from allreduce.elastic.retry import Commit, recover, retry
from allreduce.errors import ClosedError, OptionError, RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import all_values, combine, on_all_ranks
from allreduce.transport.processes import world_ranks

DROPPED = (
    "the MirroredOptimizer of this model was dropped without close(), so its gradients are not averaged any more; "
    "keep it in a variable as long as you train, or make a new one"
)

PATIENCE = 0.5  # seconds between checks for failures; longer than the worker's own

Key = tuple[tuple[int, ...], float]


class OptimizerGroup:
    """All MirroredOptimizers of some ranks.

    Members may have different topologies and backends, and ranks may use them in different orders. So their calls go
    through queues of ONE worker, on a topology that the group owns while it has members (Assembly objects).

    Python drops an unclosed optimizer at different times on different ranks, and freeing communicators is collective:
    the group keeps its resources until an optimizer is created after all ranks have dropped it.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.key = topology, _key(topology)
        self._comm = topology.private()
        self._queue = topology.service(Worker).queue("MirroredOptimizers")
        self._newest = self._count = 0
        self.members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._queues: dict[int, Queue] = {}  # of the members
        self._replaced = False  # whether a rank has failed, and a group of the remaining ranks has replaced this one
        self._failures = 0  # failed backward passes, and failed queues of members that have left
        self._resources: dict[int, ExitStack] = {}

    def enter(self, comm: MPI.Intracomm) -> int:
        """Register a new member, which calls `leave` in the end; returns its number, alike on all ranks. Collective."""
        self._count += 1
        self._newest += 1
        everyone = all_values(comm, list(self._resources), "learn which MirroredOptimizers are still used")
        for number in sorted(set(everyone[0]).intersection(*everyone[1:])):
            self._resources.pop(number).close()
        self._queue.drop()  # it may hold calls that ranks no longer wait for
        self._queue = self.topology.service(Worker).queue(f"MirroredOptimizers, {self._newest} so far")
        return self._newest

    def queue(self, number: int, topology: Topology, overlap: bool | str, on_gpu: bool) -> tuple[Queue, bool]:
        """A member's queue, and whether a thread runs its calls during backward. Collective.

        There is no thread if "auto" expects no gain, or if MPI allows none. A GPU leaves the host's cores free.
        """
        pays = overlap if overlap != "auto" else on_gpu or _overlap_pays(topology)
        threaded = topology.size > 1 and bool(pays)
        try:
            queue = self.topology.service(Worker).queue(f"MirroredOptimizer {number}", threaded)
        except UnavailableError as error:  # on all ranks
            notices.once(topology.rank, f"gradients are reduced after backward, not during it: {error}")
            queue, threaded = self.topology.service(Worker).queue(f"MirroredOptimizer {number}"), False
        self._queues[number] = queue
        return queue, threaded

    @property
    def failures(self) -> int:
        """The number of backward passes and queues that have failed so far, each on all ranks."""
        return self._failures + sum(map(_failed, self._queues.values()))

    def failed(self) -> None:
        """Count a backward that has failed on all ranks."""
        self._failures += 1

    def members_averaging_elsewhere(self, here: set[int], failures: int, failed: Callable[[], bool]) -> list[Any]:
        """Return the members that average gradients on another rank now but not on this one. Collective.

        here: the numbers of the members that average on this rank. failures: `failures` when the first of them began.
        If a backward has failed meanwhile, the ranks' numbers differ, and they exchange `here` again. failed: failed()
        tells whether a member in `here` has failed, so that other ranks may not make this call.
        """
        if self._count < 2:
            return []
        agreed = False
        while not agreed:
            if failed():
                return []  # waiting for the average raises the error
            active = np.zeros(self._newest + 3, np.int64)
            active[[number - 1 for number in here]] = 1
            active[-2:] = failures, -failures
            exchange = partial(combine, self._comm, active, "learn which MirroredOptimizers average gradients", MPI.MAX)
            future = self._queue.submit(exchange, "averages gradients")
            while not future.done():
                try:
                    future.wait(PATIENCE)
                except TimeoutError:
                    if failed():
                        return []
            future.wait()
            agreed = active[-2] == -active[-1]
        others = [int(at) + 1 for at in np.flatnonzero(active[:-2]) if at + 1 not in here]
        if any(number not in self.members for number in others):
            raise ClosedError(DROPPED)
        return [self.members[number] for number in others]

    def only_one(self) -> None:
        """Raise an OptionError on all ranks when there are several members. Runs in a member's queue.

        In join() a rank without batches follows the steps of the others, and does not know which of several members
        comes next. Members that a rank has dropped, or whose queue is broken, can't be used any more and don't count.
        """
        if len(self._queues) - len(self._resources) > 1:
            gc.collect()  # a traceback, for example, may still hold a dropped optimizer
        usable = {number for number, queue in self._queues.items() if queue.broken is None}
        usable -= set(self._resources)
        everyone = all_values(self._comm, list(usable), "learn which MirroredOptimizers are still used")
        members = len(set.intersection(*map(set, everyone)))
        if members > 1:
            text = (
                f"join() is for one optimizer, and there are {members} MirroredOptimizers on these ranks; close() the "
                "others, or make one optimizer of all parameters, with an nn.ModuleList of the models"
            )
            raise on_all_ranks(OptionError(text), self._comm)

    def leave(self, number: int) -> None:
        """Remove a member. Frees the group's communicator and topology with the last one. Collective."""
        self._count -= 1
        queue = self._queues.pop(number, None)
        self._failures += queue is not None and _failed(queue)
        if not self._count:
            _groups.pop(self.key, None)
            self._queue.drop()
            self.topology.release(self._comm)
            self.topology.close()

    def keep(self, number: int, resources: ExitStack) -> None:
        """Keep the resources of a dropped member until all ranks have dropped it. Local."""
        self._resources[number] = resources

    # Failures

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Context manager: when a rank fails, create the members again, and raise a RankLostError. Collective.

        Only where MPI lets jobs continue without a rank (ULFM); otherwise the error is raised as it is.
        """
        try:
            yield
        except Exception as error:
            if ulfm.lost(error) is None or self._replaced:  # replaced: an inner block has recovered already
                raise
            for topology in {self.topology, *(own.topology for own in self.members.values())}:
                topology.revoke()  # ends the waits of all other ranks
            self.topology.finished(False)
            raise self.regroup() from error

    def regroup(self) -> RankLostError:
        """Create the members again on the remaining ranks, in a new group. Returns the error that reports the failure.

        Collective over the remaining ranks, which have agreed that a rank has failed (Topology.finished).
        """
        members = {number: member for number, member in sorted(self.members.items()) if not member.closed}
        before = world_ranks(self.topology.world)  # asked now: the recovery frees this communicator
        newest = partial(recover, repair=partial(_newest_states, members))
        successor = retry(newest(self.topology), partial(_rebuilt, members), newest)
        self._replaced = True
        _groups.pop(self.key, None)
        _groups[successor.key] = successor
        left = world_ranks(successor.topology.world)
        failed = tuple(rank for rank, number in enumerate(before) if number not in left)
        error = _error_of(failed, len(before), members)
        for member in members.values():
            member.owners.recovered = None
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
        on_every_rank = all(number in numbers for numbers in everyone)
        commits.append(member.owners.newest(comm) if on_every_rank else member.drop)
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
    if any(each.owners.lost for each in members.values()):
        text += ". Slices of a sharded update are lost: load model and optimizer from the last checkpoint"
    error = RankLostError(text)
    error.lost = failed
    return error


def _overlap_pays(topology: Topology) -> bool:
    """Whether reducing during backward is likely to be faster.

    Across nodes a reduction mostly waits for the network, which costs backward nothing. Within a node it is memory
    traffic and polling, and needs a core that does not compute.
    """
    return topology.nodes > 1 or topology.fewest_cores >= 2 * topology.most_sharing


def _failed(queue: Queue) -> bool:
    """Whether a call of the queue has failed on all ranks."""
    return getattr(queue.broken, "ranks", None) is not None


_groups: dict[Key, OptimizerGroup] = {}


def _key(topology: Topology) -> Key:
    return world_ranks(topology.world), topology.timeout


def group_of(topology: Topology | None) -> OptimizerGroup:
    """The group of optimizers on a topology's ranks (default: all ranks), created if there is none. Collective."""
    base = topology or Topology()
    key = _key(base)
    if key not in _groups:
        own = Topology(base.world, timeout=base.timeout) if topology is not None else base
        _groups[key] = OptimizerGroup(own)
    elif topology is None:
        base.close()
    return _groups[key]
