"""Flat memory for gradients and parameters: a tensor on the model's device, and the array that the backend works on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allreduce import notices
from allreduce.arrays import gpu
from allreduce.base import AllReduce
from allreduce.errors import OptionError
from trainers.pytorch.layout import Bucket
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import TORCH, as_tensor

ALL = slice(None)


@dataclass(frozen=True)
class Flat:
    """A part of flat memory.

    array: for the backend, NumPy's or CuPy's. tensor: the same memory; or, where the backend works on the host and the
        model is on a GPU, memory there, which is staged through the array. staged: that, as a tensor; else None.
    alone: on one rank, whose backend changes nothing, so that nothing is staged for it.
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
        """Do `work(array)`, which reads and writes these elements. The host waits for copies, and for no other work."""
        if self.staged is None or self.alone:
            work(self.array)
            return
        self.staged[reads].copy_(self.tensor[reads])
        work(self.array)
        self.tensor[writes].copy_(self.staged[writes])

    def fetched(self) -> Any:
        """The array, with what the tensor has."""
        if self.staged is not None:
            self.staged.copy_(self.tensor)
        return self.array


@dataclass(frozen=True)
class Memory(Flat):
    """A bucket and its memory."""

    bucket: Bucket


def flat(backend: AllReduce, length: int, dtype: str, device: Host) -> Flat:
    """Zeroed flat memory, on the device, and where the backend reduces without a copy. As collective as `allocate`."""
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
    """Inside, what a backend makes is on the model's GPU, and it goes on to take that for this rank's."""
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


def allocate(
    backend: AllReduce, buckets: list[Bucket], lengths: dict[str, int], device: Host
) -> tuple[dict[str, Tensor], list[Memory]]:
    """The buffers, flat tensors by dtype, and each bucket's part of one. As collective as the backend's `allocate`.

    buckets, lengths: as `layout.plan` gives them.
    """
    flats = {dtype: flat(backend, length, dtype, device) for dtype, length in lengths.items()}
    parts = [(flats[each.dtype].part(each.start, each.stop), each) for each in buckets]
    memories = [Memory(part.array, part.tensor, part.staged, bucket, alone=part.alone) for part, bucket in parts]
    return {dtype: each.tensor for dtype, each in flats.items()}, memories
