"""Backups: every rank keeps the pieces of another rank too, so that a failed rank's part of a state is not lost.

Every rank has a holder, on another node if possible, to which it sends its pieces after each step. A rank updates only
after it has received every rank's gradients, and a rank sends its gradients only after its backup of the previous step
is complete. So when any rank is at step s, every rank has a backup of step s - 1. That is why a backup has the pieces
of two steps.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.transport.chunked import exchange
from allreduce.transport.control import all_values, on_all, raise_together, together
from trainers.arguments import is_integer
from trainers.errors import ArgumentError
from trainers.group import dtype_of, layout
from trainers.state.adopt import Arrays, Piece

BACKUP = "back up another rank's slice"
TAG = 2  # of backups; other messages on a trainer's communicator have other tags
NEVER = -1
NO_BACKUP = (
    "copies=2 (--backups 1): no backups are kept, because a failed rank ends the job (the others survive under "
    "mpirun --with-ft ulfm)"
)


def copies_error(copies: object) -> ArgumentError | None:
    """Return the error if `copies` is invalid, or None. Local. On a single rank copies=2 has no effect."""
    if not is_integer(copies, 1, 2):
        return ArgumentError(f"copies={copies!r}: give 1, or 2 to have another rank keep each slice too")
    return None


def kept_copies(copies: int, rank: int, outlives: bool) -> int:
    """Return the number of ranks that keep each slice: 1 instead of 2, with a notice, if a failure ends the job anyway.
    outlives: whether it does not. Local."""
    if copies == 2 and not outlives:
        notices.once(rank, NO_BACKUP)
        return 1
    return copies


def holders(nodes: Sequence[int]) -> list[int]:
    """Return, for each rank, the rank that holds its backup. Every rank holds one, if possible of a rank on another
    node.

    nodes: the number of each rank's node. At least two ranks.
    """
    by_node = sorted(range(len(nodes)), key=lambda rank: nodes[rank])
    # shifting by the size of the largest node moves every rank to another node, if that is possible
    far = max(Counter(nodes).values()) % len(nodes) or 1
    holder = {rank: by_node[(index + far) % len(nodes)] for index, rank in enumerate(by_node)}
    return [holder[rank] for rank in range(len(nodes))]


class Generation:
    """Copies of the pieces of one state, valid for steps `first` to `last`: this rank's, and those of another rank.

    serial: see Piece. rest: this rank's arrays that have no slices, as they were at that step, if a batch may
        have changed them since; else None. memory: of `own` and `rest`, used again.
    layout: of each own piece [start, stop, sliced, rest], where the last two are lists of [name, dtype, shape].
    """

    def __init__(self) -> None:
        self.first = self.last = NEVER
        self.serial = 0
        self.own: list[Piece] = []
        self.others: list[Piece] = []
        self.rest: Arrays | None = None
        self.memory: Arrays = {}
        self.layout: list[Any] = []


class Backup:
    """Keeps the pieces of the last two steps, of this rank and of another one. The constructor and `keep` are
    collective.

    comm: of all ranks. node_index: the number of this rank's node. parts: the elements that this rank owns, as [start,
        stop] pairs. If the ranks own every element twice (each node owns everything), nothing is sent.
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
        self._before, self._now = Generation(), Generation()

    def keep(self, step: int, own: Callable[[Arrays], Sequence[Piece]], common: Mapping[str, np.ndarray] = {}) -> None:
        """Back up the pieces of all ranks after step `step`. Collective.

        own: own(memory) returns copies of this rank's pieces, in `memory` as far as possible (see `snapshot_of`);
            all ranks raise its error. common: arrays that every rank holds completely, by name; copied locally instead
            of sent. If the last backup is valid for `step` already, the state was replaced meanwhile: the new backup
            gets the next serial.
        """
        self._before, self._now = self._now, self._before
        now, before = self._now, self._before
        now.serial = before.serial + (step <= before.last)
        now.first = now.last = NEVER
        now.rest = None
        self._copy(now, own)
        self._exchange(_arrays(now.own, without=common), _arrays(now.others, without=common))
        for piece in now.others:
            for name in common.keys() & piece.sliced.keys():
                piece.sliced[name][:] = common[name][piece.start : piece.stop]
        now.first = now.last = step

    def _copy(self, now: Generation, own: Callable[[Arrays], Sequence[Piece]]) -> None:
        """Copy this rank's pieces, and allocate memory for the other rank's. Collective; all ranks raise an error."""
        error = None
        try:
            now.own = list(own(now.memory))
        except Exception as met:  # of any type: the other ranks must not wait for this one
            error = met
        mine = [[each.start, each.stop, layout(each.sliced), layout(each.rest)] for each in now.own]
        if on_all(self._comm, error is None and mine == now.layout, BACKUP):
            return
        raise_together(self._comm, error)
        now.layout = []  # equal to `mine` only after the other rank's pieces are allocated
        layouts = all_values(self._comm, mine, BACKUP)
        of_source = layouts[self._source] if self._source != MPI.PROC_NULL else []
        now.others = together(self._comm, partial(_allocated, of_source))
        now.layout = mine

    def _exchange(self, own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
        sent = [(self._holder, array) for array in own] if self._holder != MPI.PROC_NULL else []
        received = [(self._source, array) for array in others] if self._source != MPI.PROC_NULL else []
        exchange(self._comm, sent, received, TAG, BACKUP)

    def extend(self, step: int) -> None:
        """Mark the newest pieces as valid up to `step`, because nothing was updated since. Local."""
        self._now.last = max(self._now.last, step)

    def save_rest(self, take: Callable[[Arrays], Arrays]) -> None:
        """Copy the arrays that have no slices, before a batch changes them. take: copies them into the given memory and
        returns them. Local."""
        self._now.rest = take(self._now.memory)

    def pieces(self, live: Sequence[Piece] = ()) -> list[Piece]:
        """Return all pieces that this rank holds; the next `keep` overwrites them. Local.

        live: copies of this rank's current pieces; their `rest` is used for older pieces that have none.
        """
        now, before = self._now, self._before
        if now.rest is not None:
            live = [each._replace(rest=now.rest) if each.first == now.first else each for each in live]
        found = [each._replace(serial=now.serial) for each in live]
        for state in (now, before):
            rest = live[0].rest if live and state.rest is None else state.rest
            for piece in [*state.own, *state.others] if state.first != NEVER else []:
                rest_of = piece.rest or rest or {}
                found.append(piece._replace(first=state.first, last=state.last, serial=state.serial, rest=rest_of))
        return [piece for piece in found if piece.start < piece.stop]


def _allocated(layouts: list[Any]) -> list[Piece]:
    """Return pieces of these layouts (see Generation), uninitialised."""
    made = []
    for start, stop, *parts in layouts:
        sliced, rest = ({name: np.empty(shape, dtype_of(dtype)) for name, dtype, shape in part} for part in parts)
        made.append(Piece(NEVER, NEVER, start, stop, sliced, rest))
    return made


def _arrays(held: Sequence[Piece], without: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the arrays of pieces whose names are not in `without`, in the order of the layout."""
    parts = (part for piece in held for part in (piece.sliced, piece.rest))
    return [array for part in parts for name, array in part.items() if name not in without]
