"""Buckets of gradients: the option, and their plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from trainers.arguments import POSITIVE, Check, Checked, is_flag

MIB = 1 << 20
ALIGN_BYTES = 64  # every gradient begins at a cache line


@dataclass(frozen=True)
class Buckets(Checked):
    """The buckets of gradients of a MirroredOptimizer or a MirroredTrainer: `buckets=Buckets(overlap=True, mb=50)`.

    overlap: True: a thread reduces buckets of gradients during backward. False: all are reduced when backward ends.
        "auto": True where it pays. MirroredOptimizer: on several nodes, on one node that has two cores for each rank,
        and on GPUs. MirroredTrainer: on two nodes with a rank each, where buckets do not change the bits of a sum.
    mb, first_mb: with overlap, the minimum size of a bucket, and of the first bucket, in MiB.
    """

    overlap: Annotated[bool | str, Check('True, False or "auto"', lambda value: is_flag(value) or value == "auto")] = (
        "auto"
    )
    mb: Annotated[float, POSITIVE] = 25.0
    first_mb: Annotated[float, POSITIVE] = 1.0

    @property
    def limits(self) -> tuple[float, float]:
        """The minimum size of the first bucket, and of a bucket, in bytes."""
        return self.first_mb * MIB, self.mb * MIB


DEFAULT_BUCKETS, AFTER_BACKWARD = Buckets(), Buckets(overlap=False)


class Slot(NamedTuple):
    """One parameter's gradient: elements [start, stop) of its dtype's buffer."""

    parameter: int  # its index in the order of the model
    start: int
    stop: int


class Bucket(NamedTuple):
    """A contiguous part [start, stop) of one buffer, reduced on its own."""

    dtype: str
    start: int
    stop: int
    slots: tuple[Slot, ...]


def plan_buckets(
    parameters: Sequence[tuple[int, str, int]], first_bytes: float, bucket_bytes: float
) -> tuple[list[Bucket], dict[str, int]]:
    """Return the buckets, in the order in which they are reduced, and the length of each dtype's buffer.

    parameters: (number of elements, dtype, bytes per element) in the order of the model. They are laid out from last to
        first, roughly the order in which backward computes gradients.
    first_bytes, bucket_bytes: a bucket is complete once it has this size. The last bucket has at most first_bytes, if
        parameter sizes allow, because no computation is left to overlap with its reduction.
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
