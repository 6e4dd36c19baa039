"""Backups: every rank keeps the pieces of another rank too, so that a failed rank's part of a state is not lost.

Every rank has a holder, on another node as far as possible. After each step it sends its pieces there. A rank updates
only after it has received every rank's gradients, and a rank sends its gradients only after the backup of the step
before is complete. So when any rank is at step s, every rank has a backup of step s - 1. That is why a backup has the
pieces of two steps.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import wait_for
from trainers.errors import ArgumentError
from trainers.group import dtype_name, dtype_of
from trainers.state.adopt import Arrays, Piece

BACKUP = "back up another rank's slice"
TAG = 2  # of messages on a trainer's communicator, where all else is 0
NEVER = -1
NO_BACKUP = (
    "copies=2: no second copies are kept, since a lost rank ends the job (mpirun --with-ft ulfm lets the others live)"
)


def refusal(copies: object, ranks: int, goes_on: bool) -> ArgumentError | None:
    """What is wrong with copies=..., if anything. Local.

    goes_on: the training goes on without failed ranks, so that one rank may be what is left of several.
    """
    if isinstance(copies, bool) or copies not in (1, 2):
        return ArgumentError(f"copies={copies!r}: give 1, or 2 to have another rank keep each slice too")
    if copies == 2 and ranks == 1 and not goes_on:
        return ArgumentError("copies=2 has another rank keep each slice too, and there is only one rank; leave it out")
    return None


def holders(nodes: Sequence[int]) -> list[int]:
    """For each rank the rank that holds its backup: each holds one, on another node as far as possible.

    nodes: the number of each rank's node. At least two ranks.
    """
    by_node = sorted(range(len(nodes)), key=lambda rank: nodes[rank])
    far = max(Counter(nodes).values()) % len(nodes) or 1  # so many ranks on, another node begins for all
    holder = {rank: by_node[(index + far) % len(nodes)] for index, rank in enumerate(by_node)}
    return [holder[rank] for rank in range(len(nodes))]


class Generation:
    """The pieces of one step, which are good for steps `first` to `last`: this rank's, and those of another rank.

    rest: this rank's arrays without slices as they were at that step, when they have changed since.
    """

    def __init__(self) -> None:
        self.first = self.last = NEVER
        self.own, self.others = Pieces(), Pieces()
        self.rest: Arrays | None = None
        self.memory: Arrays = {}  # of the rest


class Pieces:
    """Copies of pieces, in memory that is used again while the pieces have the same layout.

    layout: of each piece [start, stop, sliced, rest], where the last two are lists of [name, dtype, shape].
    """

    def __init__(self) -> None:
        self.layout: list[Any] = []
        self.all: list[Piece] = []

    def lay_out(self, layout: list[Any]) -> None:
        """Have memory for pieces of this layout."""
        if layout != self.layout:
            self.layout, self.all = layout, []
            for start, stop, *parts in layout:
                sliced, rest = (
                    {name: np.empty(shape, dtype_of(dtype)) for name, dtype, shape in part} for part in parts
                )
                self.all.append(Piece(NEVER, NEVER, start, stop, sliced, rest))

    def arrays(self, without: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """All arrays but those of some names, in the order of the layout."""
        return [
            array for piece in self.all for part in piece[4:] for name, array in part.items() if name not in without
        ]


class Backup:
    """Keeps pieces of this rank and of another one, of the last two steps. Creating and `keep` are collective.

    comm: of all ranks. node_index: the number of this rank's node. parts: the elements that this rank owns, [start,
    stop] each. Where the ranks own all elements twice (each node has all), nothing is sent.
    """

    def __init__(self, comm: MPI.Intracomm, node_index: int, parts: Sequence[Sequence[int]]) -> None:
        self._comm = comm
        nodes, owned = zip(*all_values(comm, [node_index, [list(part) for part in parts]], BACKUP), strict=True)
        sizes = [sum(stop - start for start, stop in part) for part in owned]
        length = max((stop for part in owned for _, stop in part), default=0)
        holder = holders(nodes)
        source = holder.index(comm.rank)
        sends = sum(sizes) < 2 * length
        self._holder = holder[comm.rank] if sends and sizes[comm.rank] else MPI.PROC_NULL
        self._source = source if sends and sizes[source] else MPI.PROC_NULL
        self._told: list[Any] = []  # the layouts that this rank has sent, and received, last
        self._heard: list[Any] = []
        self._before, self._now = Generation(), Generation()

    def keep(self, step: int, own: Sequence[Piece], common: Mapping[str, np.ndarray] = {}) -> None:
        """All ranks have come to this step: back up their pieces. Collective.

        own: this rank's. common: arrays that every rank has whole now, by name: they are copied here, and not sent.
        """
        self._before, self._now = self._now, self._before
        now = self._now
        now.first, now.rest = NEVER, None
        now.own.lay_out([_layout(piece) for piece in own])
        for piece, source in zip(now.own.all, own, strict=True):
            for copies, arrays in ((piece.sliced, source.sliced), (piece.rest, source.rest)):
                for name, copy in copies.items():
                    np.copyto(copy, arrays[name])
        self._tell_layout(now.own.layout)
        if self._source != MPI.PROC_NULL:
            now.others.lay_out(self._heard)
        self._exchange(now.own.arrays(common), now.others.arrays(common))
        for piece in now.others.all:
            for name in common.keys() & piece.sliced.keys():
                piece.sliced[name][:] = common[name][piece.start : piece.stop]
        now.first = now.last = step

    def _tell_layout(self, layout: list[Any]) -> None:
        """Send the holder this rank's layout where it has changed, and receive the other rank's."""
        text = np.array(bytearray(b"" if layout == self._told else json.dumps(layout).encode()), np.uint8)
        length = np.zeros(1, np.int64)
        self._exchange([np.array([text.size], np.int64)], [length])
        received = np.empty(length[0], np.uint8)
        self._exchange([text], [received])
        self._told = layout
        if received.size:
            self._heard = json.loads(received.tobytes())

    def _exchange(self, own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
        requests = []
        if self._source != MPI.PROC_NULL:
            requests += [self._comm.Irecv(each, self._source, TAG) for array in others for each in pieces(array)]
        if self._holder != MPI.PROC_NULL:
            requests += [self._comm.Isend(part, self._holder, TAG) for each in own for part in pieces(each)]
        try:
            for request in requests:
                wait_for(self._comm, request, BACKUP)
        except BaseException:
            for request in requests:
                free_later(request)
            raise

    def extend(self, step: int) -> None:
        """Nothing was updated until this step: the newest pieces are good for it too. Local."""
        self._now.last = max(self._now.last, step)

    def keep_rest(self, take: Callable[[Arrays], Arrays]) -> None:
        """Copy the arrays without slices, before a batch changes them. take: copies them into memory. Local."""
        self._now.rest = take(self._now.memory)

    def pieces(self, live: Sequence[Piece] = ()) -> list[Piece]:
        """Copies of all pieces that this rank has. Local.

        live: this rank's as they are now, copied; their `rest` stands for that of older pieces which have none.
        """
        now, before = self._now, self._before
        if now.rest is not None:
            live = [each._replace(rest=now.rest) if each.first == now.first else each for each in live]
        found = list(live)
        for kept in (now, before):
            rest = live[0].rest if live and kept.rest is None else kept.rest
            for piece in [*kept.own.all, *kept.others.all] if kept.first != NEVER else []:
                found.append(piece._replace(first=kept.first, last=kept.last, rest=piece.rest or rest or {}))
        return [_copied(piece) for piece in found if piece.start < piece.stop]


def _layout(piece: Piece) -> list[Any]:
    """The layout of one piece; see Pieces."""
    parts = piece.sliced, piece.rest
    told = [[[name, dtype_name(each.dtype), [*each.shape]] for name, each in part.items()] for part in parts]
    return [piece.start, piece.stop, *told]


def _copied(piece: Piece) -> Piece:
    sliced, rest = ({name: np.array(array) for name, array in each.items()} for each in (piece.sliced, piece.rest))
    return piece._replace(sliced=sliced, rest=rest)
