"""Loads a state of a model on all ranks: each rank offers pieces of states, and `adopt` loads the newest complete one.

A state belongs to a number of steps. Where every rank updates a slice, ranks may be one step apart when they learn of a
failure, so a piece names the steps for which it is valid.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from allreduce.transport.chunked import exchange
from allreduce.transport.control import all_values, together
from trainers.arrays.average import AVERAGE
from trainers.files.checkpoint import PROGRESS, Arrays, Progress
from trainers.group import RankGroup, broadcast_arrays
from trainers.replica import Replica, snapshot_of
from trainers.state.owners import Owners

log = logging.getLogger("trainers")

# optional entries of a state: the learning rates, and the momentum of local SGD's outer optimizer
RATES, OUTER = "trainer.learning_rates", "trainer.outer_momentum"
ADOPT = "load a state"
TAG = 3  # of the parts that rank 0 gathers; see backup.TAG


class Piece(NamedTuple):
    """Elements `start` to `stop` of a state, valid for steps `first` to `last`, between which nothing was updated.

    sliced: those elements of arrays that are as long as the state, by name. rest: arrays that have no slices.
    serial: counts replacements of the state (loads, edits); of two states of one step the higher is the newer.
    """

    first: int
    last: int
    start: int
    stop: int
    sliced: Arrays
    rest: Arrays
    serial: int = 0

    @property
    def offer(self) -> "Offer":
        """The fields by which pieces are selected."""
        return self.first, self.last, self.serial, self.start, self.stop


class Selection(NamedTuple):
    """The step of the newest state, and its pieces in order: (rank, number of the piece there)."""

    step: int
    pieces: list[tuple[int, int]]


class Found(NamedTuple):
    """The newest complete state, on every rank: its step, and its pieces in order."""

    step: int
    pieces: list[Piece]

    @property
    def state(self) -> Arrays:
        """All arrays of the state. Arrays that have no slices are those of the first piece.

        A moving average that some pieces lack, because a fit was about to begin or to drop it, is left out.
        """
        averaged = all(AVERAGE in piece.sliced for piece in self.pieces)
        names = [name for name in self.pieces[0].sliced if name != AVERAGE or averaged]
        sliced = {name: np.concatenate([piece.sliced[name] for piece in self.pieces]) for name in names}
        return {**self.pieces[0].rest, **sliced}


class Target(Protocol):
    """The part of a strategy that `adopt` uses; trainers.strategies.interface.Strategy documents the methods."""

    replica: Replica
    group: RankGroup

    @property
    def owners(self) -> Owners: ...

    def load_state(self, step: int, state: Arrays) -> None: ...


Offer = tuple[int, int, int, int, int]  # a Piece's first, last, serial, start and stop


def select(offers: Sequence[Sequence[Offer]], length: int) -> Selection | None:
    """Select the newest state of which the offers cover all `length` elements; None if there is none.

    offers: of every rank. Pieces of one state have the same serial.
    """
    states = {(step, serial) for rank in offers for first, last, serial, *_ in rank for step in (first, last)}
    for step, serial in sorted(states, reverse=True):
        pieces = _covering(offers, length, step, serial)
        if pieces is not None:
            return Selection(step, pieces)
    return None


def _covering(offers: Sequence[Sequence[Offer]], length: int, step: int, serial: int) -> list[tuple[int, int]] | None:
    """Return adjacent pieces of a state that cover it, or None; of equal pieces the first in its rank's list."""
    fitting = [
        (start, number, rank, stop)
        for rank, pieces in enumerate(offers)
        for number, (first, last, of, start, stop) in enumerate(pieces)
        if first <= step <= last and of == serial and start < stop
    ]
    reached: dict[int, tuple[int, int, int]] = {}  # by its stop: the start, rank and number of a piece
    for start, number, rank, stop in sorted(fitting):
        if (start == 0 or start in reached) and stop not in reached:
            reached[stop] = start, rank, number
    pieces: list[tuple[int, int]] = []
    at = length
    while at:
        if at not in reached:
            return None
        at, *piece = reached[at]
        pieces.append((piece[0], piece[1]))
    return pieces[::-1]


def newest(comm: MPI.Intracomm, own: Sequence[Piece], length: int) -> Found | None:
    """Return the newest state that the pieces of all ranks cover completely, or None. Collective.

    own: this rank's pieces; of equal pieces the first is used. length: of the arrays of which pieces are slices.
    """
    selection = select_newest(comm, own, length)
    if selection is None:
        return None
    return Found(selection.step, list(fetch_pieces(comm, selection, own.__getitem__)))


def select_newest(comm: MPI.Intracomm, own: Sequence[Piece], length: int) -> Selection | None:
    """As `newest`, but send no arrays: select the pieces, for `fetch_pieces`. Collective."""
    return select(all_values(comm, [piece.offer for piece in own], ADOPT), length)


def fetch_pieces(comm: MPI.Intracomm, selection: Selection, piece: Callable[[int], Piece]) -> Iterator[Piece]:
    """Yield the arrays of the selected pieces on all ranks, so that one piece at a time is in memory. Collective.

    piece: piece(number) returns a piece of this rank; all ranks raise its errors. Other fields: only valid on its rank.
    """
    for rank, number in selection.pieces:
        own = together(comm, partial(piece, number) if comm.rank == rank else lambda: Piece(0, 0, 0, 0, {}, {}))
        sliced, rest = (broadcast_arrays(comm, arrays, rank, ADOPT) for arrays in (own.sliced, own.rest))
        yield own._replace(sliced=sliced, rest=rest)


def gathered(comm: MPI.Intracomm, own: Sequence[Piece], length: int) -> Arrays:
    """Return on all ranks whole arrays, from the pieces of all ranks, which cover them. Collective. own, length: see
    `newest`."""
    found = newest(comm, own, length)
    assert found is not None
    return together(comm, lambda: found.state)


def adopt(target: Target, own: Sequence[Piece], length: int = 1, live: bool = False) -> Progress | None:
    """Load on all ranks the newest state that their pieces cover. Returns the progress of the training in it, which
    may be empty; None if there is no state. Collective.

    own, length: see `newest`. live: this rank's replica already holds the state, so it loads nothing. All ranks raise
        an error in loading.
    """
    found = newest(target.group.comm, own, length)
    if found is None:
        return None
    state = found.state
    progress = Progress.taken_from(state) if PROGRESS in state else Progress()
    together(target.group.comm, lambda: None if live else target.load_state(found.step, state))
    return progress


def adopt_whole(target: Target, state: Arrays | None, live: bool = False) -> Progress | None:
    """Load on all ranks the complete state of the lowest rank that gives one. Returns as `adopt`. Collective.

    state: this rank's; None on ranks that have none. live: as of `adopt`.
    """
    own = [] if state is None else [Piece(0, 0, 0, 1, {}, state)]
    together(target.group.comm, target.owners.begin_change)
    progress = adopt(target, own, live=live)
    target.owners.synchronize_state()  # also if nothing was loaded: it ends the change
    return progress


def mirror(target: Target, whole: bool = True) -> None:
    """Copy the state of rank 0's replica to all ranks. Collective. Raises DisagreementError if the models differ.

    whole: first gather the parts that other ranks hold; False if rank 0 has just loaded the complete state.
    """
    replica, group = target.replica, target.group
    if whole:
        together(group.comm, target.owners.check_edits)
    config, held = together(group.comm, lambda: (json.dumps(dict(replica.config), sort_keys=True), replica.state()))
    state = dict(sorted((target.owners.gather_state(held) if whole else held).items()))
    # a moving average may be in rank 0's model file alone
    kinds = {name: f"{name} {array.dtype}{list(np.shape(array))}" for name, array in state.items() if name != AVERAGE}
    shapes = ", ".join(kinds.values())
    group.agree(f"model: {shapes}; {config}")
    is_root = group.rank == 0
    adopt_whole(target, state if is_root else None, live=is_root)


def complete(target: Target) -> None:
    """Load the complete state into rank 0's replica. Collective."""
    if target.owners.kind != "replicated":
        state = target.owners.gather_state(together(target.group.comm, target.replica.state))
        target.group.on_one(lambda: target.replica.load_state(state))


def copy_state(target: Target, on_all: bool) -> Arrays:
    """Return a copy of the complete state, as `save` would write it, on rank 0, and {} elsewhere. Collective.

    on_all: return a copy on all ranks, because the others may continue without rank 0.
    """
    target.group.enter("a copy of the state")
    if not on_all:
        return target.owners.snapshot({}, target.group.rank == 0)
    return target.owners.gather_state(together(target.group.comm, lambda: snapshot_of(target.replica, {})))


def load(target: Target, state: Arrays) -> None:
    """Load on all ranks a state that `copy_state` returned. Collective. Logs a warning if the rank with the copy has
    failed."""
    target.group.enter("load a state")
    if adopt_whole(target, state or None) is None and target.group.rank == 0:
        log.warning("trainers: the rank with the copy of the state has failed; the model is not changed")


def to_root(comm: MPI.Intracomm, own: np.ndarray, parts: Sequence[slice], whole: np.ndarray | None) -> None:
    """Gather 1-D slices into `whole` on rank 0. Collective. own: the elements of this rank's `parts`, one after the
    other. whole: the array on rank 0, None elsewhere."""
    what = "collect a state on rank 0"
    everyone = all_values(comm, [[part.start, part.stop] for part in parts], what)
    held = np.split(own, np.cumsum([part.stop - part.start for part in parts[:-1]], dtype=np.int64))
    if whole is None:
        exchange(comm, [(0, each) for each in held], [], TAG, what)
        return
    for part, each in zip(parts, held, strict=False):  # without parts `held` is one empty array
        whole[part] = each
    others = enumerate(everyone[1:], 1)
    received = [(rank, whole[start:stop]) for rank, of_rank in others for start, stop in of_rank]
    exchange(comm, [], received, TAG, what)
