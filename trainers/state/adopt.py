"""The state of a model in training: the pieces of it that ranks have, and the one way in which all ranks take it on.

Whatever a state comes from (rank 0, a model file, a checkpoint, a backup, the ranks that are left), ranks offer pieces
of it, and `adopt` gives all ranks the newest state that these pieces make up.

A state belongs to a step: it is what the model has become after so many steps. Where every rank updates a slice, ranks
may be one step apart when they hear of a failure. So a piece says for which steps it is good.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, together
from allreduce.transport.wait import waiting
from trainers.group import RankGroup, broadcast_arrays
from trainers.replica import Replica

log = logging.getLogger("trainers")

Arrays = dict[str, np.ndarray]
RATES = "trainer.learning_rates"  # what may travel with a replica's state: its learning rates
ADOPT = "take on a state"


class Piece(NamedTuple):
    """Elements `start` to `stop` of a state, good for steps `first` to `last`, between which nothing was updated.

    sliced: those elements of arrays that are as long as the state, by name. rest: arrays that have no slices.
    """

    first: int
    last: int
    start: int
    stop: int
    sliced: Arrays
    rest: Arrays


class Choice(NamedTuple):
    """The step of the newest state, and its pieces in order: (rank, number of the piece there)."""

    step: int
    pieces: list[tuple[int, int]]


class Found(NamedTuple):
    """The newest state that the ranks have whole, on every rank: its step, its pieces in order, whose these are."""

    step: int
    pieces: list[Piece]
    owners: list[int]

    @property
    def state(self) -> Arrays:
        """All arrays of the state. What has no slices is the first piece's."""
        names = self.pieces[0].sliced
        sliced = {name: np.concatenate([piece.sliced[name] for piece in self.pieces]) for name in names}
        return {**self.pieces[0].rest, **sliced}


class Target(Protocol):
    """Takes on states together with other ranks: a trainer's strategy; see trainers.strategies.interface."""

    replica: Replica
    group: RankGroup

    def check_edits(self) -> None: ...

    def whole(self, state: Mapping[str, np.ndarray]) -> Arrays: ...

    def complete(self) -> None: ...

    def take_on(self, step: int, state: Arrays) -> None: ...

    def share(self) -> None: ...


Offer = tuple[int, int, int, int]  # the first numbers of a Piece


def choose(offers: Sequence[Sequence[Offer]], length: int) -> Choice | None:
    """The newest step of whose state all `length` elements are offered; None for none. offers: those of every rank."""
    steps = {step for rank in offers for first, last, *_ in rank for step in (first, last)}
    for step in sorted(steps, reverse=True):
        pieces = _covering(offers, length, step)
        if pieces is not None:
            return Choice(step, pieces)
    return None


def _covering(offers: Sequence[Sequence[Offer]], length: int, step: int) -> list[tuple[int, int]] | None:
    """Pieces for a step, one behind the other; of equal ones the one that its rank has named first."""
    fitting = [
        (start, number, rank, stop)
        for rank, pieces in enumerate(offers)
        for number, (first, last, start, stop) in enumerate(pieces)
        if first <= step <= last and start < stop
    ]
    ways: dict[int, list[tuple[int, int]]] = {0: []}  # by its end each series of pieces that begins at element 0
    for start, number, rank, stop in sorted(fitting):
        if start in ways and stop not in ways:
            ways[stop] = [*ways[start], (rank, number)]
    return ways.get(length)


def newest(comm: MPI.Intracomm, own: Sequence[Piece], length: int) -> Found | None:
    """The newest state that the pieces of all ranks make up; None when no state is whole. Collective.

    own: this rank's pieces, the preferred one of equal ones first. length: of the arrays from which pieces are cut.
    """
    choice = choose(all_values(comm, [piece[:4] for piece in own], ADOPT), length)
    if choice is None:
        return None
    found = []
    for rank, number in choice.pieces:
        piece = own[number] if comm.rank == rank else Piece(0, 0, 0, 0, {}, {})
        sliced, rest = (broadcast_arrays(comm, arrays, rank, ADOPT) for arrays in (piece.sliced, piece.rest))
        found.append(piece._replace(sliced=sliced, rest=rest))
    return Found(choice.step, found, [rank for rank, _ in choice.pieces])


def adopt(target: Target, own: Sequence[Piece], length: int = 1, live: bool = False) -> bool:
    """Have all ranks take on the newest state that their pieces make up; false when none is whole. Collective.

    own, length: as of `newest`. live: this rank's piece is what its replica has now. An error of any rank that takes
    the state on is raised on all.
    """
    found = newest(target.group.comm, own, length)
    if found is None:
        return False
    together(target.group.comm, lambda: None if live else target.take_on(found.step, found.state))
    return True


def adopt_whole(target: Target, state: Arrays | None, live: bool = False) -> bool:
    """Have all ranks take on the whole state that one of them has, the lowest; false when none has one. Collective.

    state: this rank's; None on ranks that have none. live: as of `adopt`.
    """
    own = [] if state is None else [Piece(0, 0, 0, 1, {}, state)]
    if not adopt(target, own, live=live):
        return False
    target.share()
    return True


def mirror(target: Target, whole: bool = True, root: int = 0) -> None:
    """Give all replicas the state of `root`'s. Collective; DisagreementError when they are different models.

    whole: first collect the parts of that state that other ranks have; false when the root has just loaded all of it.
    """
    replica, group = target.replica, target.group
    if whole:
        together(group.comm, target.check_edits)
    config, held = together(group.comm, lambda: (json.dumps(replica.config(), sort_keys=True), replica.state()))
    state = dict(sorted((target.whole(held) if whole else held).items()))
    shapes = ", ".join(f"{name} {array.dtype}{list(np.shape(array))}" for name, array in state.items())
    group.agree(f"model: {shapes}; {config}")
    chosen = group.rank == root
    adopt_whole(target, state if chosen else None, live=chosen)


def copied(target: Target, on_all: bool) -> Arrays:
    """A copy of the replica's whole state, as `save` would write it; nothing on ranks but 0. Collective.

    on_all: all ranks get one, since rank 0 may fail and the others go on.
    """
    comm, replica = target.group.comm, target.replica
    target.group.enter("a copy of the state")
    if on_all:
        return _copy(target.whole(together(comm, replica.state)))
    target.complete()
    return together(comm, lambda: {} if comm.rank else _copy(replica.state()))


def load(target: Target, state: Arrays) -> None:
    """All ranks take on a state that `copied` has returned. Collective."""
    target.group.enter("a state is taken on")
    if not adopt_whole(target, state or None) and target.group.rank == 0:
        log.warning("trainers: the copy of the state was lost with its rank; the model stays as it is")


def _copy(state: Mapping[str, np.ndarray]) -> Arrays:
    return {name: np.array(array) for name, array in state.items()}


def to_root(comm: MPI.Intracomm, own: np.ndarray, start: int, whole: np.ndarray | None) -> None:
    """Fill rank 0's `whole` with the parts that the ranks own, each from its `start` on; the others give None."""
    what = "collect a state on rank 0"
    parts = all_values(comm, [start, own.size], what)
    with waiting(comm, what):
        if whole is None:
            for piece in pieces(own):
                comm.Send(piece, 0)
            return
        whole[start : start + own.size] = own
        for rank, (first, size) in enumerate(parts[1:], 1):
            for piece in pieces(whole[first : first + size]):
                comm.Recv(piece, rank)
