"""The state of a model in training, kept in memory and taken on again."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, root_value, together
from allreduce.transport.wait import waiting
from trainers.group import _contiguous, sent
from trainers.state.pieces import Arrays, Piece

if TYPE_CHECKING:
    from trainers.trainer import Trainer


State = dict[str, np.ndarray]
log = logging.getLogger("trainers")


def take(trainer: "Trainer") -> State:
    """A copy of the replica's whole state, as `save` would write it, on rank 0; nothing on the others. Collective.

    Where rank 0 may be lost and the others go on, all of them get one.
    """
    trainer._enter("a copy of the state")
    if trainer.goes_on:
        return _copied(trainer._whole(together(trainer._comm, trainer.replica.state)))
    trainer._complete()
    return together(trainer._comm, lambda: {} if trainer.rank else _copied(trainer.replica.state()))


def give_back(trainer: "Trainer", state: State) -> None:
    """All ranks take on what `take` returned on rank 0. Collective."""
    trainer._enter("a state is taken on")
    if not root_value(trainer._comm, bool(state), "a state is taken on"):
        if trainer.rank == 0:
            log.warning("trainers: the state that was kept is lost with its rank; the model stays as it is")
        return
    trainer._on_one(lambda: trainer.replica.load_state(state))
    trainer._mirror(whole=False)


def _copied(state: State) -> State:
    return {name: np.array(array) for name, array in state.items()}


def pieces_sent(
    comm: MPI.Intracomm, own: Sequence[Piece], chosen: Sequence[tuple[int, int]], what: str
) -> list[tuple[Arrays, Arrays]]:
    """What has slices, and the rest, of pieces that ranks have, on all ranks. Collective.

    own: this rank's. chosen: of each the rank that has it, and its number there.
    """
    found = []
    for rank, number in chosen:
        sliced, rest = own[number][4:] if comm.rank == rank else ({}, {})
        parts = sent(comm, _contiguous(sliced), rank, what), sent(comm, _contiguous(rest), rank, what)
        found.append(parts)
    return found


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
