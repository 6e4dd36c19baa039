"""The optimizers on the same ranks: one worker runs the calls of all of them, and buries those that were dropped."""

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.engine.queue import Queue, Worker
from allreduce.errors import ClosedError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, known
from allreduce.transport.processes import world_ranks
from allreduce.wrappers.background import crowded
from trainers.replicas.pytorch.devices import Host

if TYPE_CHECKING:
    from trainers.pytorch.reducer import Averager


DROPPED = (
    "the MirroredOptimizer of this model was dropped without close(), so its gradients are averaged no longer; "
    "keep it in a variable as long as you train, or make a new one"
)

PATIENCE = 0.5  # seconds between looks at what has failed meanwhile; longer than the worker's looks at its watch

Key = tuple[tuple[int, ...], float]


class Family:
    """All MirroredOptimizers of some ranks.

    They may have topologies and backends of their own, and a program may use them in another order on another
    rank: the discriminator's gradients before the generator's. So their calls go through lanes of ONE worker, which
    has a topology of its own here, as long as there is a member.

    What is made for an optimizer can only be given back by all ranks together, and Python drops an optimizer that
    nobody has closed at another time on each rank. So its remains are kept until the next one is made, when all ranks
    are here; those that all of them have dropped are closed then.
    """

    def __init__(self, topology: Topology, key: Key) -> None:
        self.topology, self._key = topology, key
        self._comm = topology.private()
        self._lane = topology.once(Worker).queue("MirroredOptimizers")
        self.newest = self._members = 0
        self._averagers: weakref.WeakValueDictionary[int, Averager] = weakref.WeakValueDictionary()
        self._lanes: dict[int, Queue] = {}  # of the members
        self.owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # MirroredOptimizers
        self.buried = False  # a rank was lost, and a family of those that are left has taken its place
        self._failures = 0  # of backwards, and of lanes of former members
        self._remains: dict[int, ExitStack] = {}

    @classmethod
    def of(cls, topology: Topology) -> "Family":
        """A new one, to which the topology belongs. Collective."""
        return cls(topology, _key(topology))

    def lane(self, threaded: bool) -> Queue:
        """A lane for the newest member. Collective. UnavailableError on all ranks where no thread can be had."""
        lane = self._lanes[self.newest] = self.topology.once(Worker).queue(f"MirroredOptimizer {self.newest}", threaded)
        return lane

    def enter(self, comm: MPI.Intracomm) -> int:
        """The number of a new member, the same on all ranks. Collective. It calls `leave` in the end."""
        self._members += 1
        self.newest += 1
        everyone = all_values(comm, list(self._remains), "learn which MirroredOptimizers are still used")
        for number in sorted(set(everyone[0]).intersection(*everyone[1:])):
            self._remains.pop(number).close()
        self._lane.abandon()  # with what ranks have given up waiting for
        self._lane = self.topology.once(Worker).queue(f"MirroredOptimizers, {self.newest} so far")
        return self.newest

    def add(self, averager: "Averager") -> None:
        """The averager of the newest member. Local."""
        self._averagers[self.newest] = averager

    @property
    def failures(self) -> int:
        """How much has failed, on all ranks, so far."""
        return self._failures + sum(map(_failed, self._lanes.values()))

    def failed(self) -> None:
        """Count a backward that has failed on all ranks."""
        self._failures += 1

    def taking_part(self, here: set[int], failures: int, failed: Callable[[], bool]) -> "list[Averager]":
        """Of the members that average their gradients on some rank now, those that do not do so here. Collective.

        here: the numbers of those that do. failures: `failures` when the first of them began, which tells those that
        come now from a rank that came for a backward that failed meanwhile; its call is still in the lane.
        failed: whether one of them has failed, so that nobody may come here.
        """
        if self._members < 2:
            return []
        agreed = False
        while not agreed:
            if failed():
                return []  # who waits for its average gets the error
            taking = np.zeros(self.newest + 3, np.int64)
            taking[[number - 1 for number in here]] = 1
            taking[-2:] = failures, -failures
            exchange = partial(combine, self._comm, taking, "learn which MirroredOptimizers average gradients", MPI.MAX)
            pending = self._lane.submit(exchange, "averages gradients")
            while not pending.done():
                try:
                    pending.wait(PATIENCE)
                except TimeoutError:
                    if failed():
                        return []
            pending.wait()
            agreed = taking[-2] == -taking[-1]
        others = [int(at) + 1 for at in np.flatnonzero(taking[:-2]) if at + 1 not in here]
        if any(number not in self._averagers for number in others):
            raise ClosedError(DROPPED)
        return [self._averagers[number] for number in others]

    def only_one(self) -> None:
        """Raise an OptionError on all ranks when there are several members. Runs in a member's lane.

        In join() a rank without batches follows the steps of others, and of several members it does not know
        whose average or step comes next. Those that a rank has dropped, or whose lane is broken, don't count: they
        can't be used any more.
        """
        if len(self._lanes) - len(self._remains) > 1:
            gc.collect()  # a traceback, say, holds one that the program has dropped
        usable = {number for number, lane in self._lanes.items() if lane.broken is None}
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
        self._members -= 1
        lane = self._lanes.pop(number, None)
        self._failures += lane is not None and _failed(lane)
        if not self._members:
            _families.pop(self._key, None)
            self._lane.abandon()
            self.topology.release(self._comm)
            self.topology.close()

    def topologies(self) -> list[Topology]:
        """Those of all members, in which a rank may wait. Local."""
        return list(
            {id(each): each for each in (self.topology, *(own.topology for own in self.owners.values()))}.values()
        )

    def bury(self, heir: "Family") -> None:
        """Ranks were lost: another family, of those that are left, takes the place of this one. Local."""
        self.buried = True
        _families.pop(self._key, None)
        _families[heir._key] = heir

    def keep(self, number: int, remains: ExitStack) -> None:
        """Keep what a member that was dropped has left. Local."""
        self._remains[number] = remains


def _failed(lane: Queue) -> bool:
    """Whether a call of the lane has failed on all ranks."""
    return getattr(lane.broken, "ranks", None) is not None


_families: dict[Key, Family] = {}


def _key(topology: Topology) -> Key:
    return world_ranks(topology.world), topology.timeout


def family_of(topology: Topology | None) -> Family:
    """The optimizers on the ranks of a topology; of all ranks when none is given. Collective."""
    base = topology or Topology()
    key = _key(base)
    if key not in _families:
        own = Topology(base.world, timeout=base.timeout) if topology is not None else base
        _families[key] = Family(own, key)
    elif topology is None:
        base.close()
    return _families[key]


def lane_of(family: Family, topology: Topology, overlap: bool | str, device: Host) -> tuple[Queue, bool]:
    """What runs an optimizer's calls, and whether it does so in a thread while backward goes on. Collective.

    No thread where it does not pay or can't be had. While a GPU computes the host's threads have nothing to do.
    """
    pays = overlap if overlap != "auto" else device.kind == "cuda" or _overlap_pays(topology)
    if topology.size > 1 and pays:
        try:
            return family.lane(threaded=True), True
        except UnavailableError as error:
            notices.once(topology.rank, f"gradients are reduced after backward, not during it: {error}")
    return family.lane(threaded=False), False


def _overlap_pays(topology: Topology) -> bool:
    """Whether reducing during backward is likely to be faster.

    Across nodes most of it is waiting for the network, which costs backward nothing. Within a node it is
    memory traffic and polling, for which there should be a core that nobody computes on.
    """
    return topology.nodes > 1 or not crowded(topology)
