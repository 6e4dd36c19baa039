"""A board in the memory of a node: every rank writes on it what it has been called with, and reads the others.

Comparing arguments by a message would cost as much as a small reduction. A word in shared memory costs next to
nothing, so it is compared in every call: after a reduction, all ranks have been in it, so their words are there.
A rank can be one call ahead of another, not two, so two words a user and rank are enough.
Ranks of other nodes are not on the board.
"""

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import UnavailableError
from allreduce.messages.window import CommonWindow

USERS = 64  # of one topology at a time; any more do without
TURNS = 2


class Slot(NamedTuple):
    """A user's part of the board.

    words: of the whole board. starts: where the words of all ranks begin, in even and in odd calls.
    place: this rank's among them. ranks: the topology's ranks that are on the board, in the order of their words.
    """

    words: memoryview
    starts: tuple[int, int]
    place: int
    ranks: tuple[int, ...]


class Board:
    """The board of one topology. Creating and closing are collective over the ranks of a node.

    node: the ranks that really share memory; the board owns it. ranks: theirs in the topology.
    """

    def __init__(self, node: MPI.Intracomm, rank: int) -> None:
        self._node = node
        self._ranks = tuple(node.allgather(rank))
        self.free = tuple(range(USERS))  # the parts that no user has
        self._window: CommonWindow | None = None
        self._words: memoryview | None = None
        if node.size > 1:
            try:
                self._window = CommonWindow(node, USERS * TURNS * node.size, np.dtype(np.int64))
                self._words = memoryview(self._window.array)  # type: ignore[arg-type]
            except UnavailableError:  # on all ranks of the node: their memory is full, and they do without
                pass

    def take(self) -> Slot | None:
        """A part for a new user. All ranks ask in the same order."""
        if self._words is None or not self.free:
            return None
        first, *rest = self.free
        self.free = tuple(rest)
        start = first * TURNS * len(self._ranks)
        starts = (start, start + len(self._ranks))
        return Slot(self._words, starts, self._node.rank, self._ranks)

    def give_back(self, slot: Slot) -> None:
        """The user is closed. All ranks give theirs back in the same order."""
        self.free = (*self.free, slot.starts[0] // (TURNS * len(self._ranks)))

    def close(self) -> None:
        """Free the memory and the communicator. Collective."""
        if self._words is not None:
            self._words.release()
            self._words = None
        if self._window is not None:
            self._window.free()
        self._node.Free()

    def abandon(self) -> None:
        """Let go of the memory. Local."""
        self._words = self._window = None
