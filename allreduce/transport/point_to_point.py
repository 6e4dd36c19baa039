"""Point-to-point transfers in segments: one segment is reduced while the next one travels.

A view of any length moves as messages of at most SEGMENT_BYTES, so that a receiver needs only two
segments of scratch memory, they stay in its cache, and no message count ever reaches 2^31.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import chunks, dtypes
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.transport.wait import wait

SEGMENT_BYTES = 1024 * 1024
AHEAD = 2  # segments that travel while one is reduced


class Arrival(NamedTuple):
    """A segment that rank `source` sends."""

    source: int
    segment: np.ndarray  # one like it
    in_place: bool = False  # it is to be overwritten with what arrives


class Transfer:
    """Segmented sends and receives of 1-D views on one communicator.

    tag: gives the tag of the messages of the call that is under way, the same on all ranks that are in this call.
    """

    def __init__(self, comm: MPI.Intracomm, workspace: Workspace, tag: Callable[[], int]) -> None:
        self._comm = comm
        self._workspace = workspace
        self._tag = tag

    def segments(self, view: np.ndarray) -> list[np.ndarray]:
        """`view` cut into the pieces in which it travels."""
        step = max(1, SEGMENT_BYTES // view.itemsize)
        return [view[piece] for piece in chunks.segments(slice(0, view.size), step)]

    def send(self, view: np.ndarray, dest: int) -> None:
        """Send `view` to rank `dest`, which receives a view of the same length."""
        wait(*self._start_send(view, dest))

    def receive(self, view: np.ndarray, source: int) -> None:
        """Overwrite `view` with what rank `source` sends."""
        wait(*self._start_receive(view, source))

    def swap(self, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int) -> None:
        """Send `outgoing` to `dest` while overwriting `incoming` with what `source` sends."""
        receives = self._start_receive(incoming, source)
        wait(*receives, *self._start_send(outgoing, dest))

    def swap_combine(
        self, outgoing: np.ndarray, dest: int, kept: np.ndarray, source: int, op: Op, finish: bool
    ) -> None:
        """Send `outgoing` to `dest` while combining `kept` with what `source` sends, in place.

        finish: what arrives completes the sum, so each segment is also finished (scaled, for a mean).
        """
        sends = self._start_send(outgoing, dest)
        self.combine(kept, source, op, finish)
        wait(*sends)

    def combine(self, kept: np.ndarray, source: int, op: Op, finish: bool) -> None:
        """Combine `kept` in place with what `source` sends; see `swap_combine`."""
        parts = self.segments(kept)
        for part, arrived in zip(parts, self.arrivals(Arrival(source, part) for part in parts), strict=True):
            op.combine(part, arrived, out=part)
            if finish:
                op.finish(part)

    def collect(self, view: np.ndarray, op: Op) -> None:
        """Combine `view` in place with what all other ranks `send`, in rank order, and finish it.

        16-bit floats are combined in float32 and rounded once.
        """
        parts = self.segments(view)
        ranks = range(self._comm.size)
        others = [rank for rank in ranks if rank != self._comm.rank]
        arriving = self.arrivals(Arrival(rank, part) for part in parts for rank in others)
        accumulator = dtypes.TYPES[view.dtype].accumulator
        for part in parts:
            total = self._workspace.array("total", part.size, accumulator)
            for rank in ranks:
                summand = part if rank == self._comm.rank else next(arriving)
                if rank == 0:
                    np.copyto(total, summand)
                else:
                    op.combine(total, summand, out=total)
            op.finish(total)
            np.copyto(part, total, casting="unsafe")

    def exchange(self, view: np.ndarray, owned: Sequence[slice], op: Op) -> None:
        """Send every other rank what it owns of `view`, and `collect` what this one owns."""
        rank, size = self._comm.rank, self._comm.size
        owners = [(rank + distance) % size for distance in range(1, size)]  # not all ranks to the same one first
        sends = [send for owner in owners for send in self._start_send(view[owned[owner]], owner)]
        self.collect(view[owned[rank]], op)
        wait(*sends)

    def relay(self, view: np.ndarray, source: int | None, dests: Iterable[int]) -> None:
        """Overwrite `view` with what `source` sends, passing each segment on to `dests` as it arrives.

        source: None at the origin, whose `view` is what all others get.
        """
        dests = list(dests)
        receives = [] if source is None else self._start_receive(view, source)
        sends = []
        for index, part in enumerate(self.segments(view)):
            if receives:
                wait(receives[index])
            sends += [self.start(part, dest) for dest in dests]
        wait(*sends)

    def arrivals(self, expected: Iterable[Arrival], most_ahead: int = AHEAD) -> Iterator[np.ndarray]:
        """Receive the `expected` segments and yield each, in scratch memory or where it belongs.

        While the caller works on a yielded segment, the next ones travel, AHEAD of them or `most_ahead`, into
        other pieces of the scratch memory; so a segment there is valid until the caller asks for the next.
        """
        travelling: deque[tuple[MPI.Request, np.ndarray]] = deque()
        for turn, arrival in enumerate(expected):
            place = arrival.segment
            if not arrival.in_place:
                place = self._workspace.array(f"arriving {turn % (AHEAD + 1)}", place.size, place.dtype)
            travelling.append((self._expect(place, arrival.source), place))
            if len(travelling) > most_ahead:
                yield _landed(travelling.popleft())
        while travelling:
            yield _landed(travelling.popleft())

    def start(self, segment: np.ndarray, dest: int) -> MPI.Request:
        """Begin to send one segment."""
        return self._comm.Isend(dtypes.wire(segment), dest, self._tag())

    def _expect(self, place: np.ndarray, source: int) -> MPI.Request:
        """Begin to receive one segment."""
        return self._comm.Irecv(dtypes.wire(place), source, self._tag())

    def _start_receive(self, view: np.ndarray, source: int) -> list[MPI.Request]:
        return [self._expect(part, source) for part in self.segments(view)]

    def _start_send(self, view: np.ndarray, dest: int) -> list[MPI.Request]:
        return [self.start(part, dest) for part in self.segments(view)]


def _landed(message: tuple[MPI.Request, np.ndarray]) -> np.ndarray:
    request, segment = message
    wait(request)
    return segment
