"""Between PyTorch's tensors and NumPy's arrays, with no copy."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainers.replica import reserved

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The dtypes of parameters that can be averaged, with the names that `allreduce` has for them."""

TORCH = {name: dtype for dtype, name in DTYPES.items()}


def as_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of `dtype` in the memory of `array`, NumPy's or CuPy's."""
    source = torch.from_numpy if isinstance(array, np.ndarray) else torch.from_dlpack
    if dtype == torch.bfloat16:  # NumPy has this dtype only from ml_dtypes, which torch does not know
        return source(array.view(np.int16)).view(torch.bfloat16)
    return source(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """An array in the memory of a tensor of one of DTYPES; of one that is not on the CPU, a copy."""
    here = tensor.detach().cpu()
    if here.dtype == torch.bfloat16:
        return here.view(torch.int16).numpy().view(numpy_dtype(here.dtype))
    return here.numpy()


def host_view(tensor: Any) -> np.ndarray:
    """A tensor, or an array, on the host as files hold it: bfloat16 as float32. May be a view."""
    if isinstance(tensor, np.ndarray):
        return tensor
    whole = tensor.detach().cpu()
    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor of any dtype as bytes: its memory where that is the host's, a copy of another device's."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def shaped(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A view into `flat` from element `start` with the shape of `like`, and its strides where they leave no gaps.

    Strides matter to speed: a gradient should lie in memory as its parameter does (channels_last, say).
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
    """Consecutive views of `flat`, one like each tensor."""
    found, start = [], 0
    for each in like:
        found.append(shaped(flat, start, each))
        start += each.numel()
    return found


def flat_array(
    tensors: Sequence[torch.Tensor], memory: dict[str, np.ndarray] | None = None, name: str = ""
) -> np.ndarray:
    """The elements of tensors one after the other, a copy on the host; bfloat16, which files don't know, as float32.

    memory: an array of this `name` is used again, or added.
    """
    flat = [each.detach().reshape(-1) for each in tensors]
    dtype = functools.reduce(torch.promote_types, {each.dtype for each in flat})
    like = torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy()
    out = reserved({} if memory is None else memory, name, (sum(each.numel() for each in flat),), like.dtype)
    if all(each.device.type == "cpu" for each in flat):
        torch.cat(flat, out=torch.from_numpy(out))
    else:
        torch.from_numpy(out).copy_(torch.cat(flat))
    return out


def from_array(array: np.ndarray) -> torch.Tensor:
    """A tensor in the memory of `array`; a copy where PyTorch can't use that: read-only, or unsigned."""
    return torch.from_numpy(
        array if array.flags.writeable and array.dtype.kind != "u" else array.astype(_signed(array.dtype))
    )


def _signed(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.int64) if dtype.kind == "u" else dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """NumPy's name for one of DTYPES."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if dtype == torch.bfloat16 else DTYPES[dtype])
