"""The MirroredOptimizers on the same ranks: one worker runs the calls of all of them."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.engine.queue import Queue, Worker
from allreduce.errors import ClosedError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, known
from allreduce.transport.processes import world_ranks
from allreduce.wrappers.background import oversubscribed

DROPPED = (
    "the MirroredOptimizer of this model was dropped without close(), so its gradients are averaged no longer; "
    "keep it in a variable as long as you train, or make a new one"
)

PATIENCE = 0.5  # seconds between checks for failures; longer than the worker's own

Key = tuple[tuple[int, ...], float]


class Member(Protocol):
    """A MirroredOptimizer, as its group and the recovery after a lost rank see it."""

    topology: Topology
    closed: bool
    slices_lost: bool  # the recovery has not found all slices of a sharded update

    @property
    def steps(self) -> int:
        """The number of steps that it has done."""

    def join_in(self) -> Callable[[], object]:
        """Take part in an average that other ranks have begun; call the result to finish it."""

    def newest_state(self, comm: MPI.Intracomm) -> Callable[[], object]:
        """Get the newest state of the ranks of `comm`; the result takes it on, locally. Collective."""

    def rebuild(self, group: "OptimizerGroup") -> None:
        """Make all parts again on the ranks of another group. Collective."""

    def recovered(self) -> None:
        """The recovery is complete on all ranks. Local."""

    def drop(self) -> None:
        """Another rank has no such optimizer any more: drop everything. Local."""


class OptimizerGroup:
    """All MirroredOptimizers of some ranks.

    They may have topologies and backends of their own, and a program may use them in another order on another rank,
    the discriminator's gradients before the generator's, for example. So their calls go through queues of ONE worker,
    on a topology of the group, as long as there is a member.

    Freeing an optimizer's communicators is collective, and Python drops an optimizer that was not closed at another
    time on each rank. So the group holds the remains of a dropped optimizer until the next optimizer is made, which is
    collective. Then it frees the remains that all ranks have.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.key = topology, _key(topology)
        self._comm = topology.private()
        self._queue = topology.once(Worker).queue("MirroredOptimizers")
        self._newest = self._count = 0
        self.members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._queues: dict[int, Queue] = {}  # of the members
        self.replaced = False  # a rank was lost, and the group of the ranks that are left has replaced this one
        self._failures = 0  # of backwards, and of queues of members that have left
        self._remains: dict[int, ExitStack] = {}

    def enter(self, comm: MPI.Intracomm) -> int:
        """The number of a new member, the same on all ranks. Collective. It calls `leave` in the end."""
        self._count += 1
        self._newest += 1
        everyone = all_values(comm, list(self._remains), "learn which MirroredOptimizers are still used")
        for number in sorted(set(everyone[0]).intersection(*everyone[1:])):
            self._remains.pop(number).close()
        self._queue.abandon()  # with calls that ranks have given up waiting for
        self._queue = self.topology.once(Worker).queue(f"MirroredOptimizers, {self._newest} so far")
        return self._newest

    def queue(self, number: int, topology: Topology, overlap: bool | str, on_gpu: bool) -> tuple[Queue, bool]:
        """A member's queue, and whether a thread runs its calls during backward. Collective.

        There is no thread where it does not pay, or MPI allows none. While a GPU computes, the host's cores are free.
        """
        pays = overlap if overlap != "auto" else on_gpu or _overlap_pays(topology)
        threaded = topology.size > 1 and bool(pays)
        try:
            queue = self.topology.once(Worker).queue(f"MirroredOptimizer {number}", threaded)
        except UnavailableError as error:  # on all ranks
            notices.once(topology.rank, f"gradients are reduced after backward, not during it: {error}")
            queue, threaded = self.topology.once(Worker).queue(f"MirroredOptimizer {number}"), False
        self._queues[number] = queue
        return queue, threaded

    @property
    def failures(self) -> int:
        """The number of backwards and queues that have failed so far, on all ranks."""
        return self._failures + sum(map(_failed, self._queues.values()))

    def failed(self) -> None:
        """Count a backward that has failed on all ranks."""
        self._failures += 1

    def taking_part(self, here: set[int], failures: int, failed: Callable[[], bool]) -> list[Member]:
        """The members that average their gradients on another rank now, and not on this one. Collective.

        here: the numbers of the members that average on this rank. failures: `failures` when the first of them began;
        it differs for a rank whose call is of a backward that has failed meanwhile. failed: whether one of the members
        here has failed, so that other ranks may not call this any more.
        """
        if self._count < 2:
            return []
        agreed = False
        while not agreed:
            if failed():
                return []  # waiting for the average raises the error
            taking = np.zeros(self._newest + 3, np.int64)
            taking[[number - 1 for number in here]] = 1
            taking[-2:] = failures, -failures
            exchange = partial(combine, self._comm, taking, "learn which MirroredOptimizers average gradients", MPI.MAX)
            future = self._queue.submit(exchange, "averages gradients")
            while not future.done():
                try:
                    future.wait(PATIENCE)
                except TimeoutError:
                    if failed():
                        return []
            future.wait()
            agreed = taking[-2] == -taking[-1]
        others = [int(at) + 1 for at in np.flatnonzero(taking[:-2]) if at + 1 not in here]
        if any(number not in self.members for number in others):
            raise ClosedError(DROPPED)
        return [self.members[number] for number in others]

    def only_one(self) -> None:
        """Raise an OptionError on all ranks when there are several members. Runs in a member's queue.

        In join() a rank without batches follows the steps of the others, and does not know which of several members
        comes next. Members that a rank has dropped, or whose queue is broken, can't be used any more and don't count.
        """
        if len(self._queues) - len(self._remains) > 1:
            gc.collect()  # a traceback, say, holds one that the program has dropped
        usable = {number for number, queue in self._queues.items() if queue.broken is None}
        usable -= set(self._remains)
        everyone = all_values(self._comm, list(usable), "learn which MirroredOptimizers are still used")
        members = len(set.intersection(*map(set, everyone)))
        if members > 1:
            text = (
                f"join() is for one optimizer, and there are {members} MirroredOptimizers on these ranks; close() the "
                "others, or make one optimizer of all parameters, with an nn.ModuleList of the models"
            )
            raise known(OptionError(text), self._comm)

    def leave(self, number: int) -> None:
        """A member is closed. Collective."""
        self._count -= 1
        queue = self._queues.pop(number, None)
        self._failures += queue is not None and _failed(queue)
        if not self._count:
            _groups.pop(self.key, None)
            self._queue.abandon()
            self.topology.release(self._comm)
            self.topology.close()

    def keep(self, number: int, remains: ExitStack) -> None:
        """Keep the remains of a member that was dropped. Local."""
        self._remains[number] = remains

    def revoke(self) -> None:
        """End every wait of all ranks in the topologies of this group and of its members. Local."""
        for topology in {self.topology, *(own.topology for own in self.members.values())}:
            topology.revoke()

    def replace(self, successor: "OptimizerGroup") -> None:
        """Ranks were lost: the group of the ranks that are left replaces this one. Local."""
        self.replaced = True
        _groups.pop(self.key, None)
        _groups[successor.key] = successor


def _overlap_pays(topology: Topology) -> bool:
    """Whether reducing during backward is likely to be faster.

    Across nodes a reduction mostly waits for the network, which costs backward nothing. Within a node it is memory
    traffic and polling, and needs a core that does not compute.
    """
    return topology.nodes > 1 or not oversubscribed(topology)


def _failed(queue: Queue) -> bool:
    """Whether a call of the queue has failed on all ranks."""
    return getattr(queue.broken, "ranks", None) is not None


_groups: dict[Key, OptimizerGroup] = {}


def _key(topology: Topology) -> Key:
    return world_ranks(topology.world), topology.timeout


def group_of(topology: Topology | None) -> OptimizerGroup:
    """The optimizers on the ranks of a topology; of all ranks when none is given. Collective."""
    base = topology or Topology()
    key = _key(base)
    if key not in _groups:
        own = Topology(base.world, timeout=base.timeout) if topology is not None else base
        _groups[key] = OptimizerGroup(own)
    elif topology is None:
        base.close()
    return _groups[key]
