"""Ring: bandwidth-optimal, the classic of deep learning.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Steps: 2 (n - 1). Bytes sent per rank: 2 S (n - 1) / n.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.arrays.chunks import chunk
from allreduce.arrays.ops import Op
from allreduce.base import TwoPhase
from allreduce.messages.transfer import AHEAD, Arrival, Transfer
from allreduce.messages.waiting import wait, wait_all
from allreduce.topology import Topology

Piece = tuple[int, np.ndarray]  # the step in which a segment of the buffer has its turn here, and the segment


class Ring(TwoPhase):
    """Partial sums walk round the ring once, finished chunks walk round it once more.

    In step s, from 1 to 2n - 1, rank r has chunk r - s: in step 1 it sends what it has; up to step n, where
    its own chunk is, it adds to what arrives from the left; after that, what arrives is the result. Each
    segment goes on to the right at once, so no link is idle between two steps.
    """

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        super().__init__(topology, check=check)
        self._transfer = Transfer(self._comm, self.workspace)
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        if dtypes.is_half(buffer.dtype):  # sums travel as float32, results as they are
            super()._reduce(buffer, op)
        else:
            self._walk(buffer, 1, 2 * self.size - 1, op)

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._walk(buffer, 1, self.size, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        self._walk(buffer, self.size, 2 * self.size - 1, None)

    def _walk(self, buffer: np.ndarray, first: int, last: int, op: Op | None) -> None:
        """Steps `first` to `last`. op: for the sums up to step n."""
        pieces = [(step, part) for step in range(first, last + 1) for part in self._segments(buffer, step)]
        lap = sum(step < first + self.size for step, _ in pieces)
        sends: list[MPI.Request] = []
        # An arrival takes the place of what was sent from there a lap ago, so it can't be that far ahead.
        arrivals = self._transfer.arrivals(self._expected(pieces, first, lap, sends), min(AHEAD, lap - 1))
        for step, part in pieces:
            if step > first:
                arrived = next(arrivals)
                if op is not None and step <= self.size:
                    op.combine(part, arrived, out=part)
                if op is not None and step == self.size:
                    op.finish(part)
            if step < last:
                sends.append(self._comm.Isend(dtypes.wire(part), self._right))
        wait_all(sends)

    def _expected(self, pieces: Sequence[Piece], first: int, lap: int, sends: list[MPI.Request]) -> Iterator[Arrival]:
        """What arrives from the left, in order."""
        for index, (step, part) in enumerate(pieces):
            if step > self.size and index >= lap:
                wait(sends[index - lap])
            if step > first:
                yield Arrival(self._left, part, in_place=step > self.size)

    def _segments(self, buffer: np.ndarray, step: int) -> list[np.ndarray]:
        return self._transfer.segments(buffer[chunk(buffer.size, self.size, (self.rank - step) % self.size)])
