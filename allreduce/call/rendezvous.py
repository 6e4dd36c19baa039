"""The memory in which the ranks of a node meet at the start of each call, and compare it (by executor.py).

Comparing arguments by a message would cost as much as a small reduction. So the ranks of a node compare fingerprints of
64 bits in shared memory, which costs next to nothing, and they do it in every call. The leaders of several nodes then
compare their nodes' fingerprints by one small all-reduce, whose result each publishes on its node. No rank starts the
work of a call before all ranks of its node have reached it. So a rank is at most one call ahead of another, and two
rows for each user are enough: one for even calls, one for odd ones.

Beside its fingerprint a rank writes the address of its array, if the others need it. After the rendezvous each rank of
the node knows these addresses, and sees the memory that the others have written before.
"""

import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import kernels
from allreduce.call.call import SEQUENCE_MASK
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import CommonSegment

USERS = 16  # slots of a table; when they are taken, the ranks make another table
PARITIES = 2
AGREED, DIFFERENT, VERDICTS = 1, 2, 4  # a leader's verdict about a call, beside the number of the rendezvous
# Here the other ranks see the stores of one rank in their order. Elsewhere a barrier of MPI has to order them.
ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")

POLLS = 20  # reads of the fingerprints in Python before `meet` returns False

Meet = Callable[[int, Any], bool]  # the number of a rendezvous, and the array of the call


class Row(NamedTuple):
    """The memory of a call. fingerprints, addresses: those of the node's ranks. verdict: one number of the leader."""

    fingerprints: memoryview
    addresses: memoryview
    verdict: memoryview


class Slot(NamedTuple):
    """One user's place in a table.

    table, number: of the place. sequence: the number of rendezvous in it so far. rows: for even and for odd calls.
    rank: this rank's index in them.
    """

    table: "FingerprintTable"
    number: int
    sequence: int
    rows: tuple[Row, Row]
    rank: int

    def meeting(self, fingerprint: int, spin: float) -> Meet:
        """Return the function `meet(number, array)` of calls with this fingerprint. Local.

        It writes the fingerprint into the row of this number of a rendezvous, and returns True when all ranks have
        written the same one. It returns False if a rank is late, or in another call. spin: how many seconds it polls;
        negative: so long, but it yields the core between two polls.
        """
        rows, rank, size = [row.fingerprints for row in self.rows], self.rank, len(self.rows[0].fingerprints)
        by_c: Meet | None = kernels.method("meet", np.array(self._words(fingerprint, spin)), rows)
        if by_c is not None:
            return by_c
        numbered = [(rows[call % PARITIES], fingerprint | call) for call in range(SEQUENCE_MASK + 1)]
        rounds = [(row, mine, mine.to_bytes(8, sys.byteorder) * size) for row, mine in numbered]
        polls = range(POLLS if spin > 0 else 1)

        def meet(number: int, _: object) -> bool:
            row, mine, alike = rounds[number & SEQUENCE_MASK]
            row[rank] = mine
            return any(row.tobytes() == alike for _ in polls)

        return meet

    def meeting_in_c(self, fingerprint: int, spin: float, work: "CWork") -> Meet:
        """Return a function as `meeting` does, which also does `work` on the array before it returns True. Local. Only
        with the C library."""
        words = [*self._words(fingerprint, spin), object.__basicsize__, *work.words]
        state = np.array([word & 2**64 - 1 for word in words], np.uint64)  # -1 too; MPICH's handles are negative
        meet: Meet | None = kernels.method(work.function, state, (self.rows, work.keep))
        assert meet is not None
        return meet

    def _words(self, fingerprint: int, spin: float) -> list[int]:
        """Return the words of C's struct Meeting."""
        rows = [row.fingerprints for row in self.rows]
        return [*map(MPI.Get_address, rows), self.rank, len(rows[0]), fingerprint, int(spin * 1e9)]


class CWork(NamedTuple):
    """The work of a call, which C does when the ranks have met.

    function: of meeting.c. words: the 64-bit words of its struct behind `header`. keep: the memory to which they point.
    """

    function: str
    words: Sequence[int]
    keep: object = None


def double_word(value: float | None) -> int:
    """Return a factor as a word of C, where it is a double; None: 1."""
    return int(np.float64(1 if value is None else value).view(np.int64))


class FingerprintTable:
    """Shared memory of a node's ranks for the calls of USERS users. Creating it is collective over the node.

    Raises UnavailableError on all ranks of the node if the memory is not available.
    """

    def __init__(self, node: MPI.Intracomm) -> None:
        self._node = node
        self.free = dict.fromkeys(range(USERS), 0)  # free slots: number -> number of rendezvous so far
        self._width = 2 * node.size + 1
        self._segment: CommonSegment | None = CommonSegment(node, USERS * PARITIES * self._width, np.dtype(np.int64))
        self._words = memoryview(self._segment.array)  # type: ignore[arg-type]

    def take(self) -> Slot:
        """Return a free slot. Local; all ranks call it in the same order."""
        number = min(self.free)
        rows = self._row(PARITIES * number), self._row(PARITIES * number + 1)
        return Slot(self, number, self.free.pop(number), rows, self._node.rank)

    def release(self, number: int, sequence: int) -> None:
        """Free a slot. Its next user continues the count `sequence`, so old fingerprints never look new. Local."""
        self.free[number] = sequence

    def _row(self, index: int) -> Row:
        begin, size = index * self._width, self._node.size
        words = self._words
        return Row(
            words[begin : begin + size],
            words[begin + size : begin + 2 * size],
            words[begin + 2 * size : begin + self._width],
        )

    def close(self) -> None:
        """Drop the memory; a rank that is late may still use it. Local."""
        self._segment = None


class Tables:
    """The fingerprint tables of one topology, `topology.service(Tables)`. The constructor is local."""

    def __init__(self, topology: Topology) -> None:
        self._node = topology.node
        self._tables: list[FingerprintTable] = []
        self._available = True

    def take(self) -> Slot | None:
        """Return a slot for a new user, or None on the whole node if its memory is full. Collective over the node."""
        for table in self._tables:
            if table.free:
                return table.take()
        if self._available:
            try:
                self._tables.append(FingerprintTable(self._node))
                return self._tables[-1].take()
            except UnavailableError:
                self._available = False
        return None

    def close(self) -> None:
        """Free the memory. Local."""
        for table in self._tables:
            table.close()

    abandon = close


def place_hash(place: tuple[int, int]) -> int:
    """Return a number that differs between places in allocated memory. Local; the same on all ranks, because Python's
    hash of integers does not differ between processes."""
    return hash(place) & (1 << 60) - 1
