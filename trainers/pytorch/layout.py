"""Pure arithmetic: where each parameter's gradient lies in the flat buffers, and how buffers fall into buckets."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

ALIGN_BYTES = 64  # every gradient begins at a cache line


class Slot(NamedTuple):
    """The place of one parameter: elements [start, stop) of its dtype's buffer."""

    parameter: int  # its index in the order of the model
    start: int
    stop: int


class Bucket(NamedTuple):
    """A contiguous part [start, stop) of one buffer, reduced on its own."""

    dtype: str
    start: int
    stop: int
    slots: tuple[Slot, ...]


def plan(
    parameters: Sequence[tuple[int, str, int]], first_bytes: float, bucket_bytes: float
) -> tuple[list[Bucket], dict[str, int]]:
    """The buckets, in the order in which they are reduced, and the length of each dtype's buffer.

    parameters: (number of elements, dtype, bytes of an element) in the order of the model. Gradients come
        roughly from the last parameter to the first, so this is the order in which they are laid out.
    first_bytes, bucket_bytes: a bucket of a dtype is complete once it holds this much. And the last one holds
        no more than first_bytes, where parameters allow: nothing is left to hide its reduction behind.
    """
    done: list[Bucket] = []
    opened: dict[str, list[Slot]] = {}
    lengths: dict[str, int] = {}
    limits: dict[str, float] = {}
    left: dict[str, int] = {}  # bytes of a dtype that are not in a bucket yet
    for size, dtype, itemsize in parameters:
        left[dtype] = left.get(dtype, 0) + size * itemsize
    for index in reversed(range(len(parameters))):
        size, dtype, itemsize = parameters[index]
        slots = opened.setdefault(dtype, [])
        start = _aligned(slots[-1].stop if slots else lengths.get(dtype, 0), itemsize)
        slots.append(Slot(index, start, start + size))
        left[dtype] -= size * itemsize
        full = (slots[-1].stop - slots[0].start) * itemsize >= limits.get(dtype, first_bytes)
        if full or 0 < left[dtype] <= first_bytes < left[dtype] + size * itemsize:
            limits[dtype] = bucket_bytes
            _complete(dtype, opened.pop(dtype), lengths, done)
    for dtype, slots in opened.items():
        _complete(dtype, slots, lengths, done)
    return done, lengths


def _complete(dtype: str, slots: list[Slot], lengths: dict[str, int], done: list[Bucket]) -> None:
    bucket = Bucket(dtype, slots[0].start, slots[-1].stop, tuple(slots))
    lengths[dtype] = bucket.stop
    done.append(bucket)


def _aligned(start: int, itemsize: int) -> int:
    step = max(1, ALIGN_BYTES // itemsize)
    return -(-start // step) * step


class Piece(NamedTuple):
    """Elements [start, stop) of the buffer of `dtype`, all of one parameter, of whose memory `offset` is the first."""

    parameter: int
    dtype: str
    start: int
    stop: int
    offset: int


def pieces(
    buckets: Sequence[Bucket], owned: Sequence[slice], step: int, cuts: Sequence[Sequence[int]] | None = None
) -> list[Piece]:
    """What one rank updates: its own part of each bucket, cut at the parameters' borders and into blocks.

    owned: for each bucket the slice that this rank finishes, counted from the bucket's start.
    step: the largest number of elements in a piece.
    cuts: for each bucket further places to cut at, counted from its start: where any rank's own part begins.
        Nodes of different size own different parts of the same bucket; a kernel that treats the last elements
        of a piece in another way than the others gives all of them the same bits only if all pieces are alike.
    """
    result = []
    for bucket, mine, inside in zip(buckets, owned, cuts or [()] * len(buckets), strict=True):
        begin, end = bucket.start + mine.start, bucket.start + mine.stop
        borders = sorted({begin, end, *(bucket.start + at for at in inside if mine.start < at < mine.stop)})
        for slot in bucket.slots:
            for low, high in pairwise(borders):
                low, high = max(low, slot.start), min(high, slot.stop)
                for at in range(low, high, step):
                    result.append(Piece(slot.parameter, bucket.dtype, at, min(at + step, high), at - slot.start))
    return result
