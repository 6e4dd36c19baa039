"""Point-to-point transfers in segments: one segment is reduced while the next one travels.

A view of any length moves as messages of at most SEGMENT_BYTES, so that a receiver needs only two
segments of scratch memory, they stay in its cache, and no message count ever reaches 2^31.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import casts, chunks, dtypes
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.transport.wait import wait

SEGMENT_BYTES = 1024 * 1024
AHEAD = 2  # segments that are received while one is reduced


def segment_length(itemsize: int) -> int:
    """Return the number of elements in a segment; the last segment of a view may have fewer."""
    return max(1, SEGMENT_BYTES // itemsize)


class Arrival(NamedTuple):
    """A segment to receive from rank `source`."""

    source: int
    segment: np.ndarray  # an array of its length and dtype
    in_place: bool = False  # True: receive into `segment`; False: into scratch memory


class Transfer:
    """Segmented sends and receives of 1-D views on one communicator.

    tag: returns the message tag of the running call; equal on all ranks in that call.
    """

    def __init__(self, comm: MPI.Intracomm, workspace: Workspace, tag: Callable[[], int]) -> None:
        self._comm = comm
        self._workspace = workspace
        self._tag = tag

    def segments(self, view: np.ndarray) -> list[np.ndarray]:
        """Cut `view` into the segments in which it is sent. Local."""
        return [view[piece] for piece in chunks.segments(slice(0, view.size), segment_length(view.itemsize))]

    def send(self, view: np.ndarray, dest: int) -> None:
        """Send `view` to rank `dest`, which receives a view of the same length."""
        wait(*self._start_send(view, dest))

    def receive(self, view: np.ndarray, source: int) -> None:
        """Overwrite `view` with a view of the same length from rank `source`."""
        wait(*self._start_receive(view, source))

    def swap(self, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int) -> None:
        """Send `outgoing` to `dest` while overwriting `incoming` with the data that `source` sends."""
        receives = self._start_receive(incoming, source)
        wait(*receives, *self._start_send(outgoing, dest))

    def swap_combine(
        self, outgoing: np.ndarray, dest: int, kept: np.ndarray, source: int, op: Op, finish: bool
    ) -> None:
        """Send `outgoing` to `dest` while combining `kept` with the data that `source` sends, in place. `outgoing` and
        `kept` may not overlap: MPI may still read `outgoing`.

        finish: the received data completes the sum, so each segment is also finished (scaled, for a mean).
        """
        sends = self._start_send(outgoing, dest)
        self.combine(kept, source, op, finish)
        wait(*sends)

    def combine(self, kept: np.ndarray, source: int, op: Op, finish: bool) -> None:
        """Combine `kept` in place with the data that `source` sends; see `swap_combine`."""
        parts = self.segments(kept)
        for part, arrived in zip(parts, self.arrivals(Arrival(source, part) for part in parts), strict=True):
            op.combine(part, arrived, out=part)
            if finish:
                op.finish(part)

    def collect(self, view: np.ndarray, op: Op) -> None:
        """Combine `view` in place with the views that all other ranks `send`, in rank order, and finish it.

        16-bit floats are combined in float32 and rounded once.
        """
        parts = self.segments(view)
        ranks = range(self._comm.size)
        others = [rank for rank in ranks if rank != self._comm.rank]
        arriving = self.arrivals(Arrival(rank, part) for part in parts for rank in others)
        for part in parts:
            summands = (part if rank == self._comm.rank else next(arriving) for rank in ranks)
            casts.combine(summands, part, op, self._workspace)

    def exchange(self, view: np.ndarray, owned: Sequence[slice], op: Op) -> None:
        """Send every other rank the slice of `view` that it owns, and `collect` this rank's: a reduce-scatter."""
        rank, size = self._comm.rank, self._comm.size
        owners = [(rank + distance) % size for distance in range(1, size)]  # not all send to rank 0 first
        sends = [send for owner in owners for send in self._start_send(view[owned[owner]], owner)]
        self.collect(view[owned[rank]], op)
        wait(*sends)

    def relay(self, view: np.ndarray, source: int | None, dests: Iterable[int]) -> None:
        """Overwrite `view` with the data that `source` sends, passing each segment on to `dests` as it arrives.

        source: None at the origin, whose `view` all others receive.
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
        """Receive the `expected` segments and yield each, in scratch memory or in place.

        While the caller works on a yielded segment, the next `most_ahead` ones are received into other pieces of the
        scratch memory, so a segment there is valid until the caller asks for the next.
        """
        travelling: deque[tuple[MPI.Request, np.ndarray]] = deque()
        for turn, arrival in enumerate(expected):
            target = arrival.segment
            if not arrival.in_place:
                target = self._workspace.array(f"arriving {turn % (AHEAD + 1)}", target.size, target.dtype)
            travelling.append((self._start_receive_segment(target, arrival.source), target))
            if len(travelling) > most_ahead:
                yield _completed(travelling.popleft())
        while travelling:
            yield _completed(travelling.popleft())

    def start(self, segment: np.ndarray, dest: int) -> MPI.Request:
        """Begin to send one segment."""
        return self._comm.Isend(dtypes.wire(segment), dest, self._tag())

    def _start_receive_segment(self, target: np.ndarray, source: int) -> MPI.Request:
        """Begin to receive one segment."""
        return self._comm.Irecv(dtypes.wire(target), source, self._tag())

    def _start_receive(self, view: np.ndarray, source: int) -> list[MPI.Request]:
        return [self._start_receive_segment(part, source) for part in self.segments(view)]

    def _start_send(self, view: np.ndarray, dest: int) -> list[MPI.Request]:
        return [self.start(part, dest) for part in self.segments(view)]


def _completed(message: tuple[MPI.Request, np.ndarray]) -> np.ndarray:
    request, segment = message
    wait(request)
    return segment
