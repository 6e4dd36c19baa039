"""The memory in which the ranks of a node meet at the start of each call, and compare it (by executor.py).

Comparing arguments by a message would cost as much as a small reduction. So the ranks of a node compare fingerprints of
64 bits in shared memory, which costs next to nothing, and they do it in every call. The leaders of several nodes then
compare their nodes' fingerprints by one small all-reduce, whose result each publishes on its node. No rank starts the
work of a call before all ranks of its node have reached it. So a rank is at most one call ahead of another, and two
rows for each user are enough: one for even calls, one for odd ones.

Beside its fingerprint a rank writes the address of its array, if the others need it. After the rendezvous each rank of
the node knows these addresses, and sees the memory that the others have written before.
"""

import heapq
import platform
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce import kernels
from allreduce.call.call import SEQUENCE_MASK
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import shared_array

USERS = 16  # slots of a table of fingerprints; when they are taken, the ranks make another table
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


class CWork(NamedTuple):
    """The work of a call, which C does when the ranks have met.

    function: of meeting.c. words: the 64-bit words of its struct behind `header`. keep: the memory to which they point.
    """

    function: str
    words: Sequence[int]
    keep: object = None


NO_WORK = CWork("meet", ())


class Slot(NamedTuple):
    """One user's place in the tables. sequence: the number of rendezvous in it so far. rows: for even calls, for odd
    calls. rank: this rank's index in them.
    """

    number: int
    sequence: int
    rows: tuple[Row, Row]
    rank: int

    def meeting(self, fingerprint: int, spin: float, work: CWork = NO_WORK) -> Meet:
        """Return the function `meet(number, array)` of calls with this fingerprint. Local. `work` needs the C library.

        It writes the fingerprint into the row of this number of a rendezvous. When all ranks have written the same one,
        it does `work` on the array, and returns True. It returns False if a rank is late, or in another call. spin: how
        many seconds it polls; negative: so long, but it yields the core between two polls.
        """
        rows = [row.fingerprints for row in self.rows]
        header = [*map(MPI.Get_address, rows), self.rank, len(rows[0]), fingerprint, int(spin * 1e9)]
        words = [*header, object.__basicsize__, *work.words]
        state = np.array([word & 2**64 - 1 for word in words], np.uint64)  # -1 too; MPICH's handles are negative
        by_c: Meet | None = kernels.method(work.function, state, (self.rows, work.keep))
        if by_c is not None:
            return by_c
        rank, size = self.rank, len(rows[0])
        numbered = [(rows[call % PARITIES], fingerprint | call) for call in range(SEQUENCE_MASK + 1)]
        rounds = [(row, mine, mine.to_bytes(8, sys.byteorder) * size) for row, mine in numbered]
        polls = range(POLLS if spin > 0 else 1)

        def meet(number: int, _: object) -> bool:
            row, mine, alike = rounds[number & SEQUENCE_MASK]
            row[rank] = mine
            return any(row.tobytes() == alike for _ in polls)

        return meet


def double_word(value: float | None) -> int:
    """Return a factor as a word of C, where it is a double; None: 1."""
    return int(np.float64(1 if value is None else value).view(np.int64))


class Tables:
    """The slots of one topology, in memory that the ranks of a node share: `topology.service(Tables)`. The constructor
    is local."""

    def __init__(self, topology: Topology) -> None:
        self._node = topology.node
        self._free: list[Slot] = []  # a heap
        self._made = 0
        self._available = True

    def take(self) -> Slot | None:
        """Return the free slot with the lowest number, or None on the whole node if its memory is full. Collective over
        the node; all ranks call it in the same order."""
        if not self._free and self._available:
            try:
                self._add_table()
            except UnavailableError:
                self._available = False
        return heapq.heappop(self._free) if self._free else None

    def _add_table(self) -> None:
        size = self._node.size
        width = 2 * size + 1
        words = memoryview(shared_array(self._node, USERS * PARITIES * width, np.dtype(np.int64)))  # type: ignore[arg-type]
        rows = [
            Row(words[begin : begin + size], words[begin + size : begin + 2 * size], words[begin + 2 * size : end])
            for begin, end in pairwise(range(0, len(words) + 1, width))
        ]
        for even, odd in zip(rows[::PARITIES], rows[1::PARITIES], strict=True):
            heapq.heappush(self._free, Slot(self._made, 0, (even, odd), self._node.rank))
            self._made += 1

    def release(self, slot: Slot, sequence: int) -> None:
        """Free a slot. Its next user continues the count `sequence`, so old fingerprints never look new. Local."""
        heapq.heappush(self._free, slot._replace(sequence=sequence))

    def close(self) -> None:
        """Drop the memory; a rank that is late may still use it. Local."""
        self._free.clear()

    abandon = close
