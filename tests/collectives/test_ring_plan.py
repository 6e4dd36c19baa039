"""The ring's plan, without MPI; the grid runs it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from allreduce.algorithms import ring
from allreduce.arrays import chunks, ops
from allreduce.arrays.workspace import Workspace
from allreduce.transport import point_to_point


@pytest.mark.parametrize(("ranks", "length", "step"), [(4, 10, 2), (5, 3, 8), (1000, 100_003, 64)])
def test_the_cuts_of_a_length_are_made_once(
    ranks: int, length: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an array of the same length elsewhere: 1,000 ranks would spend 18 ms of each call on them."""
    made = []
    monkeypatch.setattr(ring, "chunk", lambda *given: made.append(given) or chunks.chunk(*given))
    ring.cut.cache_clear()
    for first, last in ((1, 2 * ranks - 1), (1, ranks), (ranks, 2 * ranks - 1)):
        made.clear()
        cuts = ring.cut(1, ranks, first, last, length, step).pieces
        assert len(made) == last - first + 1
        assert ring.cut(1, ranks, first, last, length, step).pieces is cuts
        assert len(made) == last - first + 1
        assert {index for _, piece in cuts for index in range(piece.start, piece.stop)} == set(range(length))
        assert all(piece.stop - piece.start <= step for _, piece in cuts)


class Link:
    """A communicator that only checks: nothing is received into memory that still has to be sent, or is being sent."""

    def __init__(self, rank: int, size: int, buffer: np.ndarray) -> None:
        self.rank, self.size, self._buffer = rank, size, buffer
        self._sent = np.zeros(buffer.size, bool)  # elements whose last send has been waited for
        self.overwritten = 0

    def _elements(self, segment: np.ndarray) -> slice:
        start = (segment.ctypes.data - self._buffer.ctypes.data) // self._buffer.itemsize
        return slice(start, start + segment.size)

    def Isend(self, segment: np.ndarray, dest: int, tag: int) -> slice:  # noqa: N802
        found = self._elements(segment)
        self._sent[found] = False
        return found

    def Irecv(self, segment: np.ndarray, source: int, tag: int) -> None:  # noqa: N802
        if np.shares_memory(segment, self._buffer):
            assert self._sent[self._elements(segment)].all()
            self.overwritten += segment.size

    def wait(self, *requests: slice | None) -> None:
        for request in requests:
            if request is not None:
                self._sent[request] = True


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_a_segment_is_overwritten_when_it_has_been_sent(
    ranks: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI copies most segments at once, so a missing wait would seldom show in sums."""
    monkeypatch.setattr(point_to_point, "SEGMENT_BYTES", 64)
    for rank in range(ranks):
        buffer = np.zeros(length)
        link: Any = Link(rank, ranks, buffer)
        for module in (ring, point_to_point):
            monkeypatch.setattr(module, "wait", link.wait)
        executor = SimpleNamespace(scratch=Workspace)
        context: Any = SimpleNamespace(rank=rank, size=ranks, comm=link, executor=executor, tag=lambda: 0)
        ring.Ring(context).reduce(buffer, ops.resolve("sum", buffer.dtype, ranks))
        own = chunks.chunk(length, ranks, rank)  # which this rank finishes
        assert link.overwritten == length - (own.stop - own.start)
