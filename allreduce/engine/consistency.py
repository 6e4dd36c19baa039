"""The fingerprint table: in shared memory, each rank writes what it has been called with, and reads the others.

Comparing arguments by a message would cost as much as a small reduction. Comparing a fingerprint of 64 bits in shared
memory costs next to nothing, so the ranks compare it in every call. No rank begins a call before all have come to it.
So a rank can be one call ahead of another, and not two: two fingerprints for each user and rank are enough.
A table exists where all ranks share a node. Elsewhere a message compares the calls (see allreduce.engine.engine).
"""

import sys
from typing import NamedTuple

import numpy as np

from allreduce.engine.call import NUMBER
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import CommonSegment

USERS = 64  # of one topology at a time; any more do without
TURNS = 2


# A part of the table, the number that this rank writes there, and the part's bytes when all ranks wrote that number.
Round = tuple[memoryview, int, bytes]


class Slot(NamedTuple):
    """A user's part of the table.

    part: its number. met: how often the ranks have met there before. turns: the fingerprints of all ranks, for calls in
    turn. place: the index of this rank's.
    """

    part: int
    met: int
    turns: tuple[memoryview, memoryview]
    place: int

    def rounds(self, fingerprint: int) -> list[Round]:
        """The round of calls with this fingerprint, for each sequence number. Made once: small calls must be quick."""
        numbered = [(self.turns[number % TURNS], fingerprint | number) for number in range(NUMBER + 1)]
        return [(words, mine, mine.to_bytes(8, sys.byteorder) * len(words)) for words, mine in numbered]


class FingerprintTable:
    """The table of one topology, `topology.once(FingerprintTable)`. Creating and closing are collective.

    Backends on a duplicate of a topology are parts of a user, and compare no calls.
    """

    def __init__(self, topology: Topology) -> None:
        self._node = node = topology.host
        self.free = dict.fromkeys(range(USERS), 0)  # parts that no user has: how often ranks have met there
        self._window: CommonSegment | None = None
        self._words: memoryview | None = None
        if node.size == topology.size > 1 and topology.original is None:
            try:
                self._window = CommonSegment(node, USERS * TURNS * node.size, np.dtype(np.int64))
                self._words = memoryview(self._window.array)  # type: ignore[arg-type]
            except UnavailableError:  # on all ranks: their memory is full, and they do without
                pass

    def take(self) -> Slot | None:
        """A part for a new user. All ranks ask in the same order."""
        if self._words is None or not self.free:
            return None
        part = min(self.free)
        size = self._node.size
        even = part * TURNS * size
        odd = even + size
        turns = self._words[even:odd], self._words[odd : odd + size]
        return Slot(part, self.free.pop(part), turns, self._node.rank)

    def give_back(self, part: int, met: int) -> None:
        """The user is closed. The next one goes on counting, so that it can't take old words for new ones."""
        self.free[part] = met

    def taken(self) -> set[int]:
        """The parts that users have. Local."""
        return {*range(USERS)} - {*self.free}

    def take_back(self, parts: set[int]) -> None:
        """Users who can't give these parts back have taken them. Local, alike on all ranks."""
        for part in parts:
            self.free[part] = self._met(part)

    def _met(self, part: int) -> int:
        """How often ranks have met in a part, as far as anybody needs to know: by the words that this one has left."""
        assert self._words is not None
        size = self._node.size
        even, odd = (self._words[(part * TURNS + turn) * size + self._node.rank] & NUMBER for turn in range(TURNS))
        return odd if (odd - even) & NUMBER == 1 else even

    def close(self) -> None:
        """Free the memory. Local."""
        if self._words is not None:
            self._words.release()
            self._words = None
        if self._window is not None:
            self._window.free()

    def abandon(self) -> None:
        """Let go of the memory. Local."""
        self._words = self._window = None
