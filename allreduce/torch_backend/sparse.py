"""Sparse tensors (COO): only what the ranks have is sent, and the result is coalesced."""

import math

import numpy as np
import torch

from allreduce.base import AllReduce
from allreduce.torch_backend.reduce_ops import Reduction
from allreduce.torch_backend.tensors import as_array, readable

OPS = ("sum", "mean")


def refuse(name: str, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Raise for a sparse tensor unless it can be reduced."""
    if tensor.is_sparse and (reduction.name not in OPS or tensor.is_complex()):
        raise NotImplementedError(
            f'{name} of backend "allreduce" takes sparse tensors of 32 and 64-bit integers and floats with SUM and '
            f"AVG; convert this one of {tensor.dtype} with to_dense()"
        )


@torch.no_grad()
def all_reduce(backend: AllReduce, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Reduce a sparse tensor in place: it is coalesced then, and has the same bits on all ranks. Collective.

    The numbers of its sparse and dense dimensions are alike on all ranks; each brings any number of entries.
    """
    shape, entries = tensor.shape[: tensor.sparse_dim()], tensor._nnz()
    strides = torch.tensor([math.prod(shape[at + 1 :]) for at in range(len(shape))], dtype=torch.int64)
    places = (tensor._indices().cpu() * strides.unsqueeze(1)).sum(0)  # as if the sparse dimensions were one
    values = readable(tensor._values())
    if reduction.factor is not None:
        values = values * reduction.factor
    width = math.prod(values.shape[1:])
    assert reduction.name is not None
    rows = as_array(values).reshape(entries, width)
    found, sums = backend.sparse(places.numpy(), rows, math.prod(shape), reduction.name)
    if reduction.divide:
        sums = np.trunc(sums / backend.size).astype(sums.dtype)
    indices = np.stack(np.unravel_index(found, shape)) if shape else np.empty((0, found.size), np.int64)
    whole = torch.empty((found.size, *values.shape[1:]), dtype=values.dtype)
    as_array(whole).reshape(sums.shape)[...] = sums
    tensor.copy_(  # a detached sparse tensor has entries of its own
        torch.sparse_coo_tensor(
            torch.from_numpy(indices), whole, tensor.shape, is_coalesced=True, check_invariants=False
        ).to(tensor.device)
    )
