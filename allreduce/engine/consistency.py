"""The fingerprint table: shared memory in which each rank writes its call's fingerprint and reads the other ranks'.

Comparing arguments by a message would cost as much as a small reduction. Comparing a fingerprint of 64 bits in shared
memory costs next to nothing, so the ranks compare it in every call. No rank starts the work of a call before all
ranks have reached it. A rank is therefore at most one call ahead of another, and two fingerprints for each user and
rank are enough. A table exists if all ranks share a node. Otherwise a message compares the calls (see engine.py).
"""

import sys
from typing import NamedTuple

import numpy as np

from allreduce.engine.call import SEQUENCE_MASK
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import CommonSegment

USERS = 64  # slots; further users of the topology compare calls by message
PARITIES = 2  # fingerprints of a rank in a slot: of even and of odd calls

# The memory of all ranks' fingerprints in a slot, the fingerprint that this rank writes, and the bytes of this memory
# when all ranks have written the same fingerprint.
Round = tuple[memoryview, int, bytes]


class Slot(NamedTuple):
    """One user's slot of the table.

    number: its index in the table. sequence: the number of rendezvous in it so far. fingerprints: of all ranks, for
    even and for odd calls. rank: this rank's index in each.
    """

    number: int
    sequence: int
    fingerprints: tuple[memoryview, memoryview]
    rank: int

    def rounds(self, fingerprint: int) -> list[Round]:
        """Return the Round of calls with this fingerprint for each sequence number. Computed once per signature."""
        numbered = [(self.fingerprints[call % PARITIES], fingerprint | call) for call in range(SEQUENCE_MASK + 1)]
        return [
            (fingerprints, mine, mine.to_bytes(8, sys.byteorder) * len(fingerprints)) for fingerprints, mine in numbered
        ]


class FingerprintTable:
    """The table of one topology, `topology.service(FingerprintTable)`. Creating it is collective.

    A duplicate of a topology has no table: its backends are parts of another backend, which compares the calls.
    """

    def __init__(self, topology: Topology) -> None:
        self._node = node = topology.host
        self.free = dict.fromkeys(range(USERS), 0)  # free slots: index -> number of rendezvous so far
        self._segment: CommonSegment | None = None
        self._fingerprints: memoryview | None = None
        if node.size == topology.size > 1 and topology.original is None:
            try:
                self._segment = CommonSegment(node, USERS * PARITIES * node.size, np.dtype(np.int64))
                self._fingerprints = memoryview(self._segment.array)  # type: ignore[arg-type]
            except UnavailableError:  # on all ranks: shared memory is full; calls are compared by message
                pass

    def take(self) -> Slot | None:
        """Return a slot for a new user, or None if there is none. Local; all ranks call it in the same order."""
        if self._fingerprints is None or not self.free:
            return None
        number = min(self.free)
        size = self._node.size
        even = number * PARITIES * size
        odd = even + size
        fingerprints = self._fingerprints[even:odd], self._fingerprints[odd : odd + size]
        return Slot(number, self.free.pop(number), fingerprints, self._node.rank)

    def release(self, number: int, sequence: int) -> None:
        """Release a slot. Its next user continues the count `sequence`, so old fingerprints never look new. Local."""
        self.free[number] = sequence

    def close(self) -> None:
        """Free the memory. Local."""
        if self._fingerprints is not None:
            self._fingerprints.release()
            self._fingerprints = None
        if self._segment is not None:
            self._segment.free()

    def abandon(self) -> None:
        """Drop the references to the memory, without freeing the segment. Local."""
        self._fingerprints = self._segment = None
