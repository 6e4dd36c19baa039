"""Second copies of what the ranks of a sharded update have alone, so that a lost rank's slice is another one's too.

Every rank has a keeper, on another node as far as there are such. After each step it sends it what the optimizer keeps
for its slice; the parameters the keeper has already. So the ranks are in two states at the most when one is lost: who
has updated has the gradients of all ranks, each of which had kept the step before. That state stays until all have kept
the next one: in one's own slice from before the last update, and in what is kept of two steps.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from allreduce.topology import Topology
from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, together
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import wait_for
from trainers.errors import ArgumentError
from trainers.replica import Replica
from trainers.state.pieces import Arrays, Piece

KEEPS = "keep a copy of another rank's slice"
TAG = 2  # of messages on a trainer's communicator, where all else is 0
NEVER = -1
NOT_KEPT = (
    "copies=2: no second copies are kept, since a lost rank ends the job (mpirun --with-ft ulfm lets the others live)"
)


def refusal(copies: object, ranks: int, goes_on: bool) -> ArgumentError | None:
    """What is wrong with copies=... goes_on: without lost ranks, so that one may be what is left of several. Local."""
    if isinstance(copies, bool) or copies not in (1, 2):
        return ArgumentError(f"copies={copies!r}: give 1, or 2 to have another rank keep each slice too")
    if copies == 2 and ranks == 1 and not goes_on:
        return ArgumentError("copies=2 has another rank keep each slice too, and there is only one rank; leave it out")
    return None


def keepers(nodes: Sequence[int]) -> list[int]:
    """For each rank the one that keeps its slice: each keeps one, on another node as far as there are such.

    nodes: the number of each rank's node. At least two ranks.
    """
    by_node = sorted(range(len(nodes)), key=lambda rank: nodes[rank])
    far = max(Counter(nodes).values()) % len(nodes) or 1  # so many places on, another node begins for all
    keeper = {rank: by_node[(place + far) % len(nodes)] for place, rank in enumerate(by_node)}
    return [keeper[rank] for rank in range(len(nodes))]


class Kept:
    """What is kept of one state, which is good for steps `first` to `last` (None: until the next update).

    ward: another rank's slice. rest: what has no slices; None while this replica has it.
    """

    def __init__(self) -> None:
        self.first, self.last = NEVER, NEVER  # type: int, int | None
        self.ward: Arrays = {}
        self.rest: Arrays | None = None
        self.memory: Arrays = {}  # for the rest


class Backup:
    """Keeps one rank's slice beside this one's. Creating, `keep` are collective; the rest is local.

    parameters: what the slices are of, on every rank that of all after a step. mine: this rank's slice. length: of what
    is trained in it, behind which are numbers that were measured.

    Raises on all ranks what a rank's replica raises.
    """

    def __init__(
        self,
        replica: Replica,
        parameters: np.ndarray,
        mine: slice,
        length: int,
        topology: Topology,
        comm: MPI.Intracomm,
    ) -> None:
        self._replica, self._parameters, self._mine, self._comm = replica, parameters, mine, comm
        self._part = slice(*mine.indices(length)[:2])
        self._own: Arrays = {}  # this rank's slice before its last update
        self._span = NEVER, NEVER  # the steps for which that is good
        self._before, self._now = Kept(), Kept()
        held = together(comm, self._held)
        side = [mine.start, mine.stop, topology.node_index, {name: array.size for name, array in held.items()}]
        sides = all_values(comm, side, KEEPS)
        starts, stops, nodes, sizes = zip(*sides, strict=True)
        keeper = keepers(nodes)
        ward = keeper.index(comm.rank)
        alone = sum(stops) - sum(starts) < 2 * parameters.size  # or nodes have the same slices, and nothing is sent
        self._keeper = keeper[comm.rank] if alone and mine.start < mine.stop else MPI.PROC_NULL
        self._ward = ward if alone and starts[ward] < stops[ward] else MPI.PROC_NULL
        self._theirs = slice(starts[ward], stops[ward])
        together(comm, lambda: self._reserve(held, sizes[ward]))

    def _held(self) -> Arrays:
        """What the optimizer keeps for this rank's slice."""
        replica = self._replica
        return {name: np.ascontiguousarray(replica.elements(name, self._part)) for name in replica.elementwise}

    def _reserve(self, held: Arrays, sizes: dict[str, int]) -> None:
        """Have all memory from the beginning. sizes: of what the optimizer of the rank whose slice is kept here has."""
        self._own = {name: np.array(array) for name, array in held.items()}
        self._own["parameters"] = np.array(self._parameters[self._mine])
        if self._ward == MPI.PROC_NULL:
            return
        for kept in (self._before, self._now):
            kept.ward = {name: np.empty(sizes[name], array.dtype) for name, array in held.items()}
            kept.ward["parameters"] = np.empty_like(self._parameters[self._theirs])

    def keep(self, step: int) -> None:
        """All ranks have come to this step: have each slice kept. Collective."""
        self._before, self._now = self._now, self._before
        before, now = self._before, self._now
        before.last = before.first if before.last is None else before.last
        now.first, now.rest = NEVER, None
        requests = []
        for name, own in self._held().items():
            if self._ward != MPI.PROC_NULL:
                requests += [self._comm.Irecv(piece, self._ward, TAG) for piece in pieces(now.ward[name])]
            if self._keeper != MPI.PROC_NULL:
                requests += [self._comm.Isend(piece, self._keeper, TAG) for piece in pieces(own)]
        if self._ward != MPI.PROC_NULL:
            now.ward["parameters"][:] = self._parameters[self._theirs]
        try:
            for request in requests:
                wait_for(self._comm, request, KEEPS)
        except BaseException:
            for request in requests:
                free_later(request)
            raise
        now.first, now.last = step, None

    def begin_batch(self) -> None:
        """A batch is computed, which may change what belongs to the state: keep what has no slices."""
        without = ("parameters", *self._replica.elementwise)
        self._now.rest = self._replica.snapshot(self._now.memory, without=without)

    def begin_update(self, first: int, last: int) -> None:
        """All ranks have kept the last state, which is good for steps `first` to `last`, and this one changes its."""
        for name in self._replica.elementwise:
            np.copyto(self._own[name], self._replica.elements(name, self._part))
        np.copyto(self._own["parameters"], self._parameters[self._mine])
        self._span = first, last
        self._now.last = last

    def pieces(self, live: Piece) -> list[Piece]:
        """What this rank has of the state, copied. live: its own slice, which may be empty, as it is now."""
        now, before = self._now, self._before
        if now.rest is not None and now.first == live.first:
            live = live._replace(rest=now.rest)  # the batch has changed the replica's
        found = [live]
        for kept in (now, before):
            if kept.first == NEVER:
                continue
            rest = live.rest if kept.rest is None else kept.rest
            last = live.last if kept.last is None else kept.last
            if self._span[0] == kept.first and self._span[1] == last:
                found.append(Piece(*self._span, self._mine.start, self._mine.stop, self._own, rest))
            if self._ward != MPI.PROC_NULL:
                found.append(Piece(kept.first, last, self._theirs.start, self._theirs.stop, kept.ward, rest))
        return [_copied(piece) for piece in found if piece.start < piece.stop]


def _copied(piece: Piece) -> Piece:
    sliced, rest = ({name: np.array(array) for name, array in each.items()} for each in (piece.sliced, piece.rest))
    return piece._replace(sliced=sliced, rest=rest)
