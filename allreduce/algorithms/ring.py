"""Ring: bandwidth-optimal, the classic all-reduce of deep learning.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Steps: 2 (n - 1). Bytes sent per rank: 2 S (n - 1) / n, also of 16-bit floats.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.algorithm import Context, TwoPhase
from allreduce.arrays import dtypes
from allreduce.arrays.chunks import chunk, segments
from allreduce.arrays.ops import Op
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.point_to_point import AHEAD, Arrival, Transfer, segment_length
from allreduce.transport.wait import wait


class Step(NamedTuple):
    """A rank's actions on one chunk in one step, in this order."""

    chunk: int
    receives: bool  # from the left
    combines: bool  # True: the received data is added to the chunk; False: it replaces the chunk
    finishes: bool  # the sum is complete, and is finished (a mean is scaled)
    sends: bool  # to the right


def plan(rank: int, ranks: int, first: int, last: int) -> list[Step]:
    """Return steps `first` to `last` of a rank. Steps 1 to `ranks` are the reduce-scatter, steps `ranks` to
    2 * ranks - 1 the all-gather.

    Partial sums travel round the ring once, then finished chunks once. All steps of rank 0 of 3:

        chunk 2: send; chunk 1: receive, combine, send; chunk 0: receive, combine, finish, send;
        chunk 2: receive, send; chunk 1: receive
    """
    return [
        Step(
            chunk=(rank - number) % ranks,
            receives=number > first,
            combines=first < number <= ranks,
            finishes=first < number == ranks,
            sends=number < last,
        )
        for number in range(first, last + 1)
    ]


class Cuts(NamedTuple):
    """The segments of the steps of a rank, in order. lap: the number of segments in the first `ranks` steps."""

    pieces: Sequence[tuple[Step, slice]]
    lap: int


@lru_cache(maxsize=64)  # a training reduces the same lengths again and again; many ranks have many cuts
def cut(rank: int, ranks: int, first: int, last: int, length: int, step: int) -> Cuts:
    """Return the segments of at most `step` elements in which `plan` moves a buffer of `length` elements."""
    parts = [
        [(each, piece) for piece in segments(chunk(length, ranks, each.chunk), step)]
        for each in plan(rank, ranks, first, last)
    ]
    return Cuts([pair for part in parts for pair in part], sum(map(len, parts[:ranks])))


class Ring(TwoPhase):
    """A rank forwards each segment of a chunk to the right at once, so no link is idle between two steps.

    16-bit floats: all ranks send their originals to the owner, which sums them in float32. Partial sums would be
    rounded at each rank.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._transfer = Transfer(self.comm, self.workspace, context.tag)
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """2 (n-1) alpha + 2 (n-1)/n S beta + (n-1)/n S gamma (Patarasuk and Yuan 2009); the slowest link sets the
        pace."""
        return machine.call + cost.ring(nbytes, layout.ranks, layout, machine, crosses=layout.nodes > 1)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if dtypes.is_half(buffer.dtype):
            super().reduce(buffer, op)
        else:
            self._walk(buffer, 1, 2 * self.size - 1, op)

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        if dtypes.is_half(buffer.dtype):
            self._transfer.exchange(buffer, [self.owned(buffer.size, rank) for rank in range(self.size)], op)
        else:
            super().reduce_scatter(buffer, op)

    def scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._walk(buffer, 1, self.size, op)

    def all_gather(self, buffer: np.ndarray) -> None:
        self._walk(buffer, self.size, 2 * self.size - 1, None)

    def _walk(self, buffer: np.ndarray, first: int, last: int, op: Op | None) -> None:
        """Do the steps `first` to `last`, segment by segment. op: for steps that combine or finish."""
        cuts, lap = cut(self.rank, self.size, first, last, buffer.size, segment_length(buffer.itemsize))
        pieces = [(step, buffer[piece]) for step, piece in cuts]
        sends: list[MPI.Request] = []
        # A segment is received into memory that was sent one lap ago, so receives run less than a lap ahead.
        arrivals = self._transfer.arrivals(self._expected(pieces, lap, sends), min(AHEAD, lap - 1))
        for step, part in pieces:
            arrived = next(arrivals) if step.receives else part
            if step.combines and op is not None:
                op.combine(part, arrived, out=part)
            if step.finishes and op is not None:
                op.finish(part)
            if step.sends:
                sends.append(self._transfer.start(part, self._right))
        wait(*sends)

    def _expected(
        self, pieces: Sequence[tuple[Step, np.ndarray]], lap: int, sends: list[MPI.Request]
    ) -> Iterator[Arrival]:
        """Yield the segments that arrive from the left, in order."""
        for index, (step, part) in enumerate(pieces):
            if step.receives:
                if not step.combines and index >= lap:
                    wait(sends[index - lap])
                yield Arrival(self._left, part, in_place=not step.combines)
