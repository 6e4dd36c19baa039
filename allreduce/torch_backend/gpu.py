"""CUDA tensors: handed to our backends as CuPy arrays where CuPy is there, staged through the host elsewhere."""

from collections.abc import Sequence
from typing import Any

import torch

from allreduce.arrays import gpu
from allreduce.base import AllReduce

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)  # known to CuPy and to us


def takes(tensor: torch.Tensor) -> bool:
    """True for a CUDA tensor that can be reduced as a CuPy array."""
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype not in _DTYPES:
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True


def reduce(backend: AllReduce, tensor: torch.Tensor, op: str) -> None:
    """Reduce a CUDA tensor in place, on PyTorch's current stream."""
    import cupy

    index = tensor.device.index
    with cupy.cuda.Device(index), gpu.stream_of(_stream(tensor.device), index):
        backend(cupy.from_dlpack(tensor.detach()), op)


class Streams:
    """The caller's CUDA streams at the time of a call; the group's thread works on streams of its own."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._written = [_stream(device).record_event() for device in self._devices]

    def before(self) -> None:
        """Wait until the caller's kernels have written the tensors."""
        for event in self._written:
            event.synchronize()

    def after(self) -> None:
        """Wait until all that this thread started on the GPU is done."""
        for device in self._devices:
            _stream(device).synchronize()


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)
