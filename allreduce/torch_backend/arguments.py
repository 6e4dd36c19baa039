"""The several forms in which PyTorch's layers pass the same arguments to a process group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "allreduce"
Tensors = torch.Tensor | Sequence[torch.Tensor]


def as_list(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def inner(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The one list in a list of lists (one for each GPU of a process, once); none on ranks that bring nothing."""
    if tensors and isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    return list(tensors[0]) if tensors else []


def operation(opts: Any) -> Any:
    """The ReduceOp in what a caller gave: options, an operation, or nothing for a sum."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def not_offered(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f'backend "{NAME}" does not offer {what}; {instead}')
