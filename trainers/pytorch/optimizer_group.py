"""The MirroredOptimizers on the same ranks: one worker runs the calls of all of them."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.call.queue import Queue, Worker
from allreduce.errors import ClosedError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, on_all, on_all_ranks
from allreduce.transport.processes import world_ranks

DROPPED = (
    "the MirroredOptimizer of this model was dropped without close(), so its gradients are not averaged any more; "
    "keep it in a variable as long as you train, or make a new one"
)

PATIENCE = 0.5  # seconds between checks for failures; longer than the worker's own

Key = tuple[tuple[int, ...], float]


class OptimizerGroup:
    """All MirroredOptimizers of some ranks.

    Members may have different topologies and backends, and ranks may use them in different orders (discriminator before
    generator, for example). So their calls go through queues of ONE worker, on a topology that the group owns while it
    has members: each one is a trainers.pytorch.assembly.Assembly.

    Freeing communicators is collective, but Python's garbage collection drops an unclosed optimizer at different times
    on different ranks. So the group keeps the resources of dropped optimizers. When the next optimizer is created,
    which is collective, it frees the resources of those that all ranks have dropped.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.key = topology, _key(topology)
        self._comm = topology.private()
        self._queue = topology.service(Worker).queue("MirroredOptimizers")
        self._newest = self._count = 0
        self.members: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._queues: dict[int, Queue] = {}  # of the members
        self.replaced = False  # whether a rank has failed, and a group of the remaining ranks has replaced this one
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

    def revoke(self) -> None:
        """End every wait of all ranks in the topologies of this group and of its members. Local."""
        for topology in {self.topology, *(own.topology for own in self.members.values())}:
            topology.revoke()

    def replace(self, successor: "OptimizerGroup") -> None:
        """After a failure: replace this group by `successor`, that of the remaining ranks. Local."""
        self.replaced = True
        _groups.pop(self.key, None)
        _groups[successor.key] = successor


def _overlap_pays(topology: Topology) -> bool:
    """Whether reducing during backward is likely to be faster.

    Across nodes a reduction mostly waits for the network, which costs backward nothing. Within a node it is memory
    traffic and polling, and needs a core that does not compute.
    """
    if topology.nodes > 1:
        return True
    return on_all(topology.world, topology.cores >= 2 * topology.sharing, "check for spare cores")


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
