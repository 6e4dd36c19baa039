"""Buckets: the layout of gradients in flat buffers, and the memory of these buffers.

First pure arithmetic: where each gradient lies, how buffers are divided into buckets, which part a rank updates. Then
the memory, on the model's device and where the backend reduces it. Then marks, which show edits of this memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.errors import AllReduceError, OptionError
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import TORCH, as_tensor

ALIGN_BYTES = 64  # every gradient begins at a cache line

# How often a tensor was edited in place. PyTorch has no public name for it.
version_of: Callable[[Tensor], int] = attrgetter("_version")


class GradientError(AllReduceError, RuntimeError):
    """Gradients were produced, changed or left out in a way in which they can't be averaged."""


def changed(name: str, now: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The text of an error: the shape or dtype of a parameter or its gradient has changed."""
    return (
        f"{name} has become {tuple(now.shape)} {now.dtype} since MirroredOptimizer was made, "
        f"where it was {tuple(shape)} {dtype}; close() it and make it again after such a change"
    )


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


class Block(NamedTuple):
    """Elements [start, stop) of the buffer of `dtype`, all of one parameter, of whose memory `offset` is the first."""

    parameter: int
    dtype: str
    start: int
    stop: int
    offset: int


def blocks(
    buckets: Sequence[Bucket], owned: Sequence[slice], step: int, cuts: Sequence[Sequence[int]] | None = None
) -> list[Block]:
    """The blocks that one rank updates: its part of each bucket, cut at the borders of the parameters and at `cuts`.

    owned: for each bucket the slice that this rank owns, counted from the bucket's start.
    step: the largest number of elements in a block.
    cuts: for each bucket where the part of any rank begins, counted from the bucket's start. Nodes of different sizes
        own different parts of the same bucket, and a kernel may treat the last elements of a block differently. So all
        ranks must cut alike to get the same bits.
    """
    result = []
    for bucket, mine, inside in zip(buckets, owned, cuts or [()] * len(buckets), strict=True):
        for slot in bucket.slots:
            for begin, end in parts(mine, inside):
                low, high = max(bucket.start + begin, slot.start), min(bucket.start + end, slot.stop)
                for at in range(low, high, step):
                    result.append(Block(slot.parameter, bucket.dtype, at, min(at + step, high), at - slot.start))
    return result


def parts(mine: slice, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """The parts of a slice between the cuts inside of it; none of an empty slice."""
    return list(pairwise(sorted({mine.start, mine.stop, *(at for at in cuts if mine.start < at < mine.stop)})))


ALL = slice(None)


@dataclass(frozen=True)
class Flat:
    """A part of flat memory.

    array: for the backend, of NumPy or CuPy. tensor: the same memory. Where the backend works on the host and the model
        is on a GPU, it is memory there, and is copied to and from the array. staged: then the array as a tensor, else
        None. alone: there is one rank, so the backend changes nothing and nothing is copied.
    """

    array: Any
    tensor: Tensor
    staged: Tensor | None
    alone: bool = field(default=False, kw_only=True)

    def part(self, start: int, stop: int) -> "Flat":
        span = slice(start, stop)
        staged = None if self.staged is None else self.staged[span]
        return Flat(self.array[span], self.tensor[span], staged, alone=self.alone)

    def through(self, work: Callable[[Any], object], reads: slice = ALL, writes: slice = ALL) -> None:
        """Do `work(array)`, which reads and writes these elements. The host waits only for copies."""
        if self.staged is None or self.alone:
            work(self.array)
            return
        self.staged[reads].copy_(self.tensor[reads])
        work(self.array)
        self.tensor[writes].copy_(self.staged[writes])

    def fetched(self) -> Any:
        """The array, with the values of the tensor."""
        if self.staged is not None:
            self.staged.copy_(self.tensor)
        return self.array


def flat(backend: AllReduce, length: int, dtype: str, device: Host) -> Flat:
    """Zeroed flat memory on the device, which the backend reduces without a copy. As collective as `allocate`."""
    if device.kind == "cpu":
        array = backend.allocate(length, dtype, "cpu")
        return Flat(array, as_tensor(array, TORCH[dtype]), None)
    with own_gpu(device):
        array = backend.allocate(length, dtype)
        tensor = as_tensor(array, TORCH[dtype])
        if gpu.is_gpu_array(array):
            _same_gpu(tensor, device, backend)
            return Flat(array, tensor, None)
        alone = backend.size == 1
        if not alone:
            notices.once(backend.rank, STAGED.format(backend.name))
        return Flat(array, torch.zeros(length, dtype=TORCH[dtype], device=device.device), tensor, alone=alone)


@contextmanager
def own_gpu(device: Host) -> Iterator[None]:
    """Inside, a backend allocates on the model's GPU, and takes it as this rank's from then on."""
    with device.current():
        gpu.keep_device(device.device.index)
        yield


STAGED = (
    'the model is on a GPU and the backend "{}" works on the host: gradients are copied there and back; '
    'allreduce="nccl" reduces them where they are'
)


def _same_gpu(tensor: Tensor, device: Host, backend: AllReduce) -> None:
    if tensor.device != device.device:
        raise OptionError(
            f"the model is on {device.device}, and {backend.name!r} is on {tensor.device} already; call "
            f"torch.cuda.set_device({device.device.index}) first of all"
        )


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their bytes


class Marks:
    """Shows edits of scattered gradients that PyTorch does not count: `p.grad.data.mul_()`, `p.grad.numpy()`.

    After a reduce_scatter the elements that a rank does not own have no meaning. So the rank writes a large number into
    one such element of each parameter's gradient. An edit of the whole gradient changes the number. It makes a norm so
    large that clipping edits the gradient. Every element has ranks that do not own it, so some rank notices an edit on
    all ranks. On the CPU only: on a GPU the host would have to wait.

    flats: the gradients by dtype. owned: the part of each bucket of `plan` that this rank owns.
    """

    def __init__(
        self, flats: Mapping[str, Tensor], plan: Sequence[Bucket], owned: Sequence[slice], device: Host
    ) -> None:
        self._marked: list[tuple[np.ndarray, np.ndarray, int]] = []  # memory as integers, indices, value
        if device.kind != "cpu":
            return
        found: dict[str, list[int]] = {dtype: [] for dtype in flats}
        for bucket, mine in zip(plan, owned, strict=True):
            begin, end = bucket.start + mine.start, bucket.start + mine.stop
            for slot in bucket.slots:
                if slot.start == slot.stop:
                    continue
                if slot.start < begin:
                    found[bucket.dtype].append(slot.start)
                elif slot.stop > end:
                    found[bucket.dtype].append(slot.stop - 1)
        for dtype, flat in flats.items():
            integers = BITS[flat.element_size()]
            mark = torch.tensor(torch.finfo(flat.dtype).max / 3, dtype=flat.dtype).view(integers).item()
            self._marked.append((flat.view(integers).numpy(), np.array(found[dtype], np.intp), int(mark)))

    def put(self) -> None:
        """Write the marks: gradients are scattered now. Local."""
        for memory, elements, mark in self._marked:
            memory[elements] = mark

    def there(self) -> bool:
        """Whether all marks are unchanged. Local."""
        return all(bool((memory[elements] == mark).all()) for memory, elements, mark in self._marked)

    def clear(self) -> None:
        """Drop the memory. Local."""
        self._marked.clear()
