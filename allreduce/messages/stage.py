"""Where the ranks of a node lay out pieces of ordinary arrays for each other: a table in shared memory.

table[rank, half, chunk] is memory of `rank` for a segment of one chunk: what it contributes to the rank that
finishes this chunk or, in its own, what it has finished. An array goes through the table in turns, a segment of
every chunk in each, and turns take the halves alternately. Of three ranks that reduce an array in two turns, rank 0

    puts others 0  |  combines, puts own 0, puts others 1  |  gets others 0, combines, puts own 1  |  gets others 1
    [0, 0, 1:]     |  [:, 0, 0]  [0, 0, 0]    [0, 1, 1:]   |  [r, 0, r]      [:, 1, 0]  [0, 1, 0]  |  [r, 1, r]

with a fence at every bar. What is written before a fence is read behind it, and is written again behind the next
one at the earliest, in this call or in the next, which goes on with the other half.
"""

import numpy as np
from mpi4py import MPI

from allreduce.arrays.chunks import chunk, segment
from allreduce.messages.window import Window

LEAST_BYTES = 512 * 1024
LARGEST_BYTES = 16 * 1024 * 1024  # of a node, whatever the number of ranks; a container may have 64 MB in all
CACHE_LINE = 64
# Arrays tend to begin at the start of a page. Copies between equal places in pages are slow on many
# processors (AMD's Zen 4: twice), so the slots begin in the middle of one.
OFFSET = 2048


def wanted_bytes(nbytes: int, ranks: int) -> int:
    """The size of a table through which an array of `nbytes` goes in two turns, or the largest one.

    In a third turn slots are written again that their last reader still has in its cache. Where ranks don't have a
    cache in common that takes twenty times as long as a copy: 27 ns a line between the complexes of an EPYC.
    """
    return min(1 << max(nbytes * ranks - 1, 1).bit_length(), LARGEST_BYTES)


class Stage:
    """The table, in `nbytes` of shared memory in all. Collective.

    Raises UnavailableError on all ranks of `comm` where the memory can't be had.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        self.rank, self.size, self.nbytes = comm.rank, comm.size, nbytes
        slots = 2 * self.size
        # Whole cache lines, so that no segment of any dtype is ever out of line.
        self.slot_bytes = max(nbytes // (self.size * slots * CACHE_LINE), 1) * CACHE_LINE
        memory = Window(comm, OFFSET + slots * self.slot_bytes).ranks
        assert memory is not None
        self.table = memory[:, OFFSET:].reshape(self.size, 2, self.size, self.slot_bytes)
        self.turn = 0  # of all calls so far


class Staged:
    """One 1-D array on its way through the table. Local."""

    def __init__(self, stage: Stage, array: np.ndarray) -> None:
        self._stage, self._array = stage, array
        self._step = stage.slot_bytes // array.itemsize  # elements of a segment
        self.turns = -(-array.size // (self._step * stage.size))
        self._others = [rank for rank in range(stage.size) if rank != stage.rank]

    def put_others(self, turn: int) -> None:
        """Lay out what the other ranks are to reduce; past the last turn there is nothing."""
        for other in self._others:
            np.copyto(self._slot(turn, self._stage.rank, other), self._array[self._span(turn, other)])

    def own(self, turn: int) -> np.ndarray:
        """The segment that this rank finishes, in the array itself."""
        return self._array[self._span(turn, self._stage.rank)]

    def contributions(self, turn: int) -> list[np.ndarray]:
        """All ranks' segments of this rank's chunk; its own is where it always was."""
        mine = self._stage.rank
        ranks = range(self._stage.size)
        return [self.own(turn) if rank == mine else self._slot(turn, rank, mine) for rank in ranks]

    def put_own(self, turn: int) -> None:
        """Lay out what this rank has finished; past the last turn there is nothing."""
        np.copyto(self._slot(turn, self._stage.rank, self._stage.rank), self.own(turn))

    def get_others(self, turn: int) -> None:
        """Fetch what the other ranks have finished."""
        for other in self._others:
            np.copyto(self._array[self._span(turn, other)], self._slot(turn, other, other))

    def end(self) -> None:
        """Leave the table to the next array. All ranks have done the same turns."""
        self._stage.turn += self.turns

    def _span(self, turn: int, rank: int) -> slice:
        return segment(chunk(self._array.size, self._stage.size, rank), self._step, turn)

    def _slot(self, turn: int, rank: int, part: int) -> np.ndarray:
        span = self._span(turn, part)
        nbytes = (span.stop - span.start) * self._array.itemsize
        return self._stage.table[rank, (self._stage.turn + turn) % 2, part, :nbytes].view(self._array.dtype)
