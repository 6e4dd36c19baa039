"""The memory of buckets of gradients, and the work on each bucket.

In this order: (1) the memory, on the model's device and where the backend reduces it; (2) gradients as views of this
memory, and buckets of them, which are averaged; (3) marks that detect edits of this memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce import notices
from allreduce.arrays import dtypes, gpu
from allreduce.backend import AllReduce
from allreduce.errors import AllReduceError, OptionError
from trainers import checks
from trainers.checks import GradientArray, GradientCheck, Span
from trainers.options.buckets import Bucket
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import TORCH, as_array, as_tensor, shaped
from trainers.state.dealing import Share
from trainers.state.sharded import Flat


class GradientError(AllReduceError, RuntimeError):
    """Gradients were produced, changed or left out in a way in which they can't be averaged."""


def changed(name: str, now: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The error text for a parameter or gradient whose shape or dtype has changed."""
    return (
        f"{name} has become {tuple(now.shape)} {now.dtype} since MirroredOptimizer was made, "
        f"where it was {tuple(shape)} {dtype}; close() it and make it again after such a change"
    )


def spans_of(bucket: Bucket) -> list[slice]:
    """Return the slice of the bucket that each tensor occupies, with the gap after it."""
    starts = [slot.start - bucket.start for slot in bucket.slots]
    return [slice(*ends) for ends in pairwise([*starts, bucket.stop - bucket.start])]


def allocate_flat(backend: AllReduce, length: int, dtype: str, device: Host, shared: Any = None) -> Flat:
    """Allocate zeroed 1-D memory on the device, which the backend reduces without a copy if it can. Collective.

    shared: an array on the CPU that is this memory already, instead of a new one.
    """
    if device.kind == "cpu":
        array = backend.allocate(length, dtype, "cpu") if shared is None else shared
        return Flat(array, as_tensor(array, TORCH[dtype]))
    with own_gpu(device):
        array = backend.allocate(length, dtype)
        tensor = as_tensor(array, TORCH[dtype])
        if gpu.is_gpu_array(array):
            _same_gpu(tensor, device, backend)
            return Flat(array, tensor)
        alone = backend.size == 1
        if not alone:
            notices.once(backend.rank, STAGED.format(backend.name))
        return Flat(array, torch.zeros(length, dtype=TORCH[dtype], device=device.device), tensor, alone=alone)


@contextmanager
def own_gpu(device: Host) -> Iterator[None]:
    """Context manager: backends created or used in the block allocate on the model's GPU, and keep using it."""
    with device.current():
        gpu.set_device(device.device.index)
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


GRAPH = "{}.grad has a graph (create_graph=True), which the backend's memory loses; use torch.autograd.grad there"


class Gradient:
    """The gradient of a parameter, and the view into the flat buffer in which it is averaged.

    name: the parameter's. flats: the buffers by dtype. start: the first element of the view in the buffer of `dtype`.
    leftover: a reduce_scatter has left averages in `.grad` only in the part that this rank owns.
    """

    def __init__(self, name: str, parameter: Parameter, flats: Mapping[str, Tensor], dtype: str, start: int) -> None:
        self.name, self.parameter, self.leftover = name, parameter, False
        self._flats, self._dtype, self._start = flats, dtype, start
        self._view = self.view_of(flats)
        self._address = self._view.data_ptr()

    def view_of(self, flats: Mapping[str, Tensor]) -> Tensor:
        """Return the view of this parameter's elements in buffers of the gradients' layout. flats: by dtype."""
        return shaped(flats[self._dtype], self._start, self.parameter)

    def current_view(self) -> Tensor:
        """Return the view; a new one if the program has changed the memory of the last one (`grad.data = ...`)."""
        if self._view.data_ptr() != self._address:
            self._view = self.view_of(self._flats)
        return self._view

    def adopt(self, check_memory: bool = False) -> bool:
        """Make .grad the view, copying its values if needed. Returns whether it was the view already.

        check_memory: also check that the view still uses the buffer's memory; module.double() changes it.
        """
        grad = self.parameter.grad
        if grad is self._view and (not check_memory or grad is self.current_view()):
            return True
        view = self.current_view()
        assert grad is not None
        if grad.dtype != view.dtype or grad.shape != view.shape:
            raise GradientError(changed(self.name, grad, tuple(view.shape), view.dtype))
        if grad.requires_grad:
            raise GradientError(GRAPH.format(self.name))
        view.copy_(grad.to_dense() if grad.is_sparse else grad)
        self.parameter.grad, self.leftover = view, False
        return False

    def replaced(self) -> bool:
        """Whether the program has replaced .grad by a tensor outside of the buffer (`p.grad = ...`)."""
        grad, view = self.parameter.grad, self._view
        if grad is None:
            return False
        if grad is not view and (
            grad.is_sparse or (grad.dtype, grad.shape, grad.stride()) != (view.dtype, view.shape, view.stride())
        ):
            return True
        return grad.data_ptr() != self._address

    def release(self) -> None:
        """Set .grad to None if it is the view."""
        if self.parameter.grad is self._view:
            self.parameter.grad = None


SECOND = (
    'got a second gradient after its first was averaged in slices (update="sharded"): compute all gradients of a step '
    "but the last inside of optimizer.no_sync(), and call optimizer.zero_grad() between steps, not model.zero_grad()"
)


class DenseBucket:
    """Dense gradients that are contiguous in a flat buffer, averaged by one reduction. Creating it is collective.

    layout: the bucket's. memory: its part of the buffer. gradients: those of all parameters.
    share: the part that this rank updates and whose averages it gets; None for all.
    parameters: the indices of the bucket's parameters. gather: gathers the averages of all ranks, if they are divided.

    In each step call `prepare`, and in the queue `weigh`, `check` (if gradients are checked) and `reduce`.
    """

    def __init__(
        self, layout: Bucket, memory: Flat, gradients: Sequence[Gradient], backend: AllReduce, share: Share | None
    ) -> None:
        self.layout, self.memory = layout, memory
        self.parameters = [slot.parameter for slot in layout.slots]
        self._gradients = [gradients[number] for number in self.parameters]
        self.share = Share([slice(0, memory.array.size)]) if share is None else share
        self._sum = backend.bind(memory.array, "mean", "all_reduce" if share is None else "reduce_scatter")
        self.gather = None if share is None else memory.gathering(backend, share)
        self._dtype = dtypes.parse(layout.dtype)
        self._sent = backend.compression.sent(self._dtype)

    def gradient_array(self) -> GradientArray:
        """Describe the bucket to a GradientCheck. Local."""
        begin = self.layout.start
        slots = zip(self._gradients, self.layout.slots, strict=True)
        spans = [Span(gradient.name, slot.start - begin, slot.stop - slot.start) for gradient, slot in slots]
        return GradientArray(spans, self._dtype, self._sent)

    def prepare(self) -> list[int]:
        """Fill the bucket with this rank's gradients, or zeros. Returns the parameters without a gradient. Local."""
        unused = []
        for number, gradient in zip(self.parameters, self._gradients, strict=True):
            if gradient.parameter.grad is None:
                gradient.current_view().zero_()
                unused.append(number)
            elif gradient.adopt(check_memory=True) and gradient.leftover:
                raise GradientError(f"{gradient.name} {SECOND}")
        return unused

    def weigh(self, weight: float) -> None:
        """Multiply this rank's gradients by its weight."""
        if weight == 0.0:
            self.memory.tensor.zero_()  # a multiplication by 0 would keep NaN
        elif weight != 1.0:
            self.memory.tensor.mul_(weight)

    def check(self, gradient_check: GradientCheck, number: int) -> None:
        """Check this rank's gradients. number: the index of this bucket in the check."""
        gradient_check.check_array(number, self.memory.fetched())

    def reduce(self) -> None:
        """Average the gradients over the ranks, in the part that this rank owns. Collective."""
        self.memory.run_on_array(self._reduce, writes=self.share.parts)

    def _reduce(self) -> None:
        self._sum()
        self.share.deliver(self.memory.array)

    def overflowed(self, comm: MPI.Intracomm) -> int:
        """The first element whose average is not finite on some rank; -1 for none. Collective."""
        array, parts = self.memory.array, self.share.parts
        averages = array[parts[0]] if len(parts) == 1 else np.concatenate([array[:0], *(array[part] for part in parts)])
        return checks.overflowed(comm, averages, lambda index: int(np.r_[parts][index]))


class Marks:
    """Detects edits of scattered gradients that PyTorch's version counter misses (`p.grad.data`, `p.grad.numpy()`).

    The rank writes a large number into an element of each parameter's gradient that it does not own. An edit of the
    whole gradient changes it, and a norm with it always clips. Every element is unowned on some rank, which notices. On
    the CPU only: on a GPU the host would have to wait.

    flats: the gradients by dtype. owned: the parts of each bucket of `plan` that this rank owns, in order.
    """

    def __init__(
        self, flats: Mapping[str, Tensor], plan: Sequence[Bucket], owned: Sequence[Sequence[slice]], device: Host
    ) -> None:
        self._marked: list[tuple[np.ndarray, np.ndarray, Any]] = []  # memory, indices, value
        if device.kind != "cpu":
            return
        found: dict[str, list[int]] = {dtype: [] for dtype in flats}
        for bucket, mine in zip(plan, owned, strict=True):
            for slot in bucket.slots:
                at = slot.start
                for part in mine:
                    if bucket.start + part.start <= at < bucket.start + part.stop:
                        at = bucket.start + part.stop
                if at < slot.stop:
                    found[bucket.dtype].append(at)
        for dtype, flat in flats.items():
            memory = as_array(flat)
            mark = memory.dtype.type(torch.finfo(flat.dtype).max / 3)
            self._marked.append((memory, np.array(found[dtype], np.intp), mark))

    def put(self) -> None:
        """Write the marks: gradients are scattered now. Local."""
        for memory, elements, mark in self._marked:
            memory[elements] = mark

    def unchanged(self) -> bool:
        """Whether all marks are unchanged. Local."""
        return all(bool((memory[elements] == mark).all()) for memory, elements, mark in self._marked)

    def clear(self) -> None:
        """Drop the memory. Local."""
        self._marked.clear()
