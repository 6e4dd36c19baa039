"""Index arithmetic of chunks, also for buffers that are too large for a test to allocate."""

import itertools

import numpy as np
import pytest

from allreduce.algorithms import native
from allreduce.arrays import ops
from allreduce.arrays.chunks import chunk, segments

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 1000, 100003, 2**31 - 1, 2**31, 2**31 + 1, 2**33 + 17, 10**15 + 1)
PARTS = (1, 2, 3, 4, 5, 7, 64, 4096)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_cover_a_buffer_exactly(length: int, parts: int) -> None:
    cut = [chunk(length, parts, index) for index in range(parts)]
    assert cut[0].start == 0
    assert cut[-1].stop == length
    assert all(before.stop == after.start for before, after in itertools.pairwise(cut))
    sizes = {span.stop - span.start for span in cut}
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("length", [0, 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 2**33 + 17])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_native_stays_below_the_largest_count_of_mpi(length: int, op: str) -> None:
    resolved = ops.resolve(op, np.dtype("float32"), 4)
    pieces = list(segments(slice(0, length), native.largest_piece(4, resolved)))
    assert sum(piece.stop - piece.start for piece in pieces) == length
    assert all(before.stop == after.start for before, after in itertools.pairwise(pieces))
    assert all(0 < piece.stop - piece.start < 2**31 for piece in pieces)
    if op == "sum":
        assert len(pieces) <= length // 2**30 + 1  # as few calls as the counts allow
