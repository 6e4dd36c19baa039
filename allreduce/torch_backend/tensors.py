"""Tensors for MPI and NumPy: in contiguous CPU memory, copied only if they are not there already."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes  # noqa: F401 # NumPy knows "bfloat16" by it
import numpy as np
import torch
from mpi4py import MPI


def is_plain(tensor: torch.Tensor, on_gpu: bool = False) -> bool:
    """Return whether the tensor is contiguous, not lazily conjugated or negated, and on the CPU ("plain").

    on_gpu: it may also be on a GPU.
    """
    placed = on_gpu or tensor.device.type == "cpu"
    return placed and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor, on_gpu: bool = False) -> torch.Tensor:
    """Return the tensor in plain memory; a copy if its own is not plain. on_gpu: plain memory on its device."""
    tensor = tensor.detach()
    if is_plain(tensor, on_gpu):
        return tensor
    return (tensor if on_gpu else tensor.cpu()).resolve_conj().resolve_neg().contiguous()


@contextmanager
def writable(tensor: torch.Tensor, filled: bool = False, on_gpu: bool = False) -> Iterator[torch.Tensor]:
    """Context manager: plain memory for the new content of `tensor`: its own, or a buffer that is copied to it later.

    filled: the memory has the tensor's content at first, and may be on a GPU if `on_gpu`.
    """
    tensor = tensor.detach()
    if is_plain(tensor, on_gpu):
        yield tensor
        return
    memory = readable(tensor, on_gpu) if filled else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    yield memory
    tensor.copy_(memory)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a plain tensor as bytes, for operations that only move it."""
    return _memory(tensor, np.dtype(np.uint8))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a plain tensor as a 1-D array, for operations that reduce it; complex numbers as pairs."""
    return _memory(tensor, numpy_dtype(tensor.dtype))


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype of `as_array`."""
    return np.dtype("uint8" if dtype == torch.bool else str(dtype.to_real()).removeprefix("torch."))


def _memory(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """Return an array on the tensor's memory, valid as long as the caller holds the tensor.

    tensor.numpy() is not used: after it PyTorch can't resize the storage any more, which FSDP does.
    """
    if tensor.nbytes == 0:
        return np.empty(0, dtype)
    memory: Any = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return np.frombuffer(memoryview(memory), dtype)  # weak references need a view


class Streams:
    """The caller's CUDA streams at the time of a call. The group's thread works on its own streams."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._written = [torch.cuda.current_stream(device).record_event() for device in self._devices]

    def wait_for_caller(self) -> None:
        """Wait until the caller's kernels have written the tensors."""
        for event in self._written:
            event.synchronize()

    def synchronize(self) -> None:
        """Wait until the GPU has finished all work that this thread has started."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
