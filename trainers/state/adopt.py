"""The state of a model in training: put together from what ranks have of it, and taken on by all of them."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, root_value, together
from allreduce.transport.wait import waiting
from trainers.group import RankGroup, broadcast_arrays
from trainers.replica import Replica
from trainers.state.pieces import Arrays, Choice, Piece, choose, joined

log = logging.getLogger("trainers")


class Holder(Protocol):
    """What holds a state together with other ranks: a trainer's strategy; see trainers.strategies.interface."""

    replica: Replica
    group: RankGroup

    def check_edits(self) -> None: ...

    def whole(self, state: Mapping[str, np.ndarray]) -> Arrays: ...

    def complete(self) -> None: ...

    def share(self) -> None: ...


def mirror(holder: Holder, whole: bool = True, root: int = 0) -> None:
    """Give all replicas the state of `root`'s. Collective; DisagreementError when they are different models.

    whole: collect first what of that state other ranks have; false when the root has just loaded all of it.
    """
    replica, group = holder.replica, holder.group
    if whole:
        together(group.comm, holder.check_edits)
    config, held = together(group.comm, lambda: (json.dumps(replica.config(), sort_keys=True), replica.state()))
    state = dict(sorted((holder.whole(held) if whole else held).items()))
    shapes = ", ".join(f"{name} {array.dtype}{list(np.shape(array))}" for name, array in state.items())
    group.agree(f"model: {shapes}; {config}")
    state = broadcast_arrays(group.comm, state, root, f"take on the state of rank {root}")
    together(group.comm, lambda: replica.load_state(state) if group.rank != root else None)
    holder.share()


def copied(holder: Holder, on_all: bool) -> Arrays:
    """A copy of the replica's whole state, as `save` would write it; nothing on ranks but 0. Collective.

    on_all: all ranks get one, since rank 0 may fail and the others go on.
    """
    comm, replica = holder.group.comm, holder.replica
    holder.group.enter("a copy of the state")
    if on_all:
        return _copy(holder.whole(together(comm, replica.state)))
    holder.complete()
    return together(comm, lambda: {} if comm.rank else _copy(replica.state()))


def load(holder: Holder, state: Arrays) -> None:
    """All ranks take on what `copied` returned on rank 0. Collective."""
    group = holder.group
    group.enter("a state is taken on")
    if not root_value(group.comm, bool(state), "a state is taken on"):
        if group.rank == 0:
            log.warning("trainers: the state that was kept is lost with its rank; the model stays as it is")
        return
    group.on_one(lambda: holder.replica.load_state(state))
    mirror(holder, whole=False)


def _copy(state: Mapping[str, np.ndarray]) -> Arrays:
    return {name: np.array(array) for name, array in state.items()}


class Newest(NamedTuple):
    """A state that ranks have together. choice: of the pieces; None when no step is whole, and `state` is empty then.

    taken: the steps that every rank has ended.
    """

    choice: Choice | None
    state: Arrays
    taken: list[int]


NEWEST = "take on the newest state of the ranks that are left"


def newest(group: RankGroup, own: Sequence[Piece], steps: int, length: int) -> Newest:
    """The newest state that the pieces of all ranks make whole, on all ranks. Collective.

    own: this rank's pieces. steps: that it has ended. length: of the arrays from which pieces are cut.
    """
    sides = all_values(group.comm, [steps, [piece[:4] for piece in own]], NEWEST)
    taken = [side[0] for side in sides]
    choice = choose([offers for _, offers in sides], length)
    if choice is None:
        return Newest(None, {}, taken)
    found = []
    for rank, number in choice.pieces:
        sliced, rest = own[number][4:] if group.rank == rank else ({}, {})
        sliced = broadcast_arrays(group.comm, sliced, rank, NEWEST)
        found.append((sliced, broadcast_arrays(group.comm, rest, rank, NEWEST)))
    return Newest(choice, joined(found), taken)


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
