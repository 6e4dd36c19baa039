"""Conversions between PyTorch tensors and NumPy arrays, without a copy where possible."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The dtypes of parameters that can be averaged, with their names in `allreduce`."""

TORCH = {name: dtype for dtype, name in DTYPES.items()}


# How often a tensor was edited in place. PyTorch has no public name for it.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def as_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of `dtype` in the memory of `array`, a NumPy or CuPy array."""
    source = torch.from_numpy if isinstance(array, np.ndarray) else torch.from_dlpack
    if dtype == torch.bfloat16:  # NumPy has this dtype only from ml_dtypes, which torch does not know
        return source(array.view(np.int16)).view(torch.bfloat16)
    return source(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array in the memory of a tensor of one of DTYPES; a copy if the tensor is on a GPU."""
    here = tensor.detach().cpu()
    if here.dtype == torch.bfloat16:
        return here.view(torch.int16).numpy().view(numpy_dtype(here.dtype))
    return here.numpy()


def host_view(tensor: Any) -> np.ndarray:
    """Return a tensor or array as a NumPy array for a file: bfloat16 becomes float32. May be a view."""
    if isinstance(tensor, np.ndarray):
        return tensor
    whole = tensor.detach().cpu()
    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a dense tensor of any dtype as bytes: its memory if it is contiguous and on the CPU, else a copy."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a tensor of one element may have any stride, and `view` requires 1
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()


def shaped(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat` from element `start`, with the shape of `like`, and its strides if `like` is dense.

    Strides matter for speed: a gradient should have the strides of its parameter (channels_last, for example).
    """
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.detach().as_strided(like.shape, strides, start)


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill one block of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def views(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of `flat`, with the shapes of these tensors."""
    found, start = [], 0
    for each in like:
        found.append(shaped(flat, start, each))
        start += each.numel()
    return found


class Placed:
    """Parameters in flat memory, and a check that they stay there. views: of the memory, one for each. Local."""

    def __init__(self, parameters: Sequence[torch.Tensor], views: list[torch.Tensor]) -> None:
        self._parameters, self.views = list(parameters), views
        self._addresses = [view.data_ptr() for view in views]

    @torch.no_grad()
    def enter(self, copies: bool) -> None:
        """Make the parameters views of the memory. copies: copy their values there first."""
        for parameter, view in zip(self._parameters, self.views, strict=True):
            if copies and parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
            parameter.data = view

    def leave(self) -> None:
        """Move the parameters that are still there into memory of their own."""
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def left(self) -> list[int]:
        """Return the numbers of the parameters that left the memory (`p.data = ...`, `model.double()`)."""
        pairs = enumerate(zip(self._parameters, self._addresses, strict=True))
        return [number for number, (parameter, address) in pairs if parameter.data_ptr() != address]


def from_array(array: np.ndarray) -> torch.Tensor:
    """Return a tensor in the memory of `array`; a copy if PyTorch can't use it (read-only, or unsigned)."""
    dtype = np.int64 if array.dtype.kind == "u" else array.dtype
    return torch.from_numpy(array if array.flags.writeable and array.dtype == dtype else array.astype(dtype))


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy dtype for one of DTYPES."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if dtype == torch.bfloat16 else DTYPES[dtype])
