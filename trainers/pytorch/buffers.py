"""The gradients' memory: flat buffers that the backend has allocated, and the buckets as parts of them."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from allreduce.base import AllReduce
from trainers.pytorch.layout import Bucket
from trainers.replicas.pytorch.tensors import TORCH, as_tensor


class Memory(NamedTuple):
    """A bucket and its memory, as an array for the backend and as a tensor."""

    bucket: Bucket
    array: np.ndarray
    tensor: Tensor


def allocate(
    backend: AllReduce, buckets: list[Bucket], lengths: dict[str, int]
) -> tuple[dict[str, Tensor], list[Memory]]:
    """The buffers, flat tensors by dtype, and each bucket's part of one. As collective as the backend's `allocate`.

    buckets, lengths: as `layout.plan` gives them.
    """
    arrays = {dtype: backend.allocate(length, dtype) for dtype, length in lengths.items()}
    flats = {dtype: as_tensor(array, TORCH[dtype]) for dtype, array in arrays.items()}
    return flats, [
        Memory(each, arrays[each.dtype][each.start : each.stop], flats[each.dtype][each.start : each.stop])
        for each in buckets
    ]
