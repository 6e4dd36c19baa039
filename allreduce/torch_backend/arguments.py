"""The several forms in which users and PyTorch's layers pass the same arguments to a process group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "allreduce"
Tensors = torch.Tensor | Sequence[torch.Tensor]


def only(name: str, tensors: Tensors) -> torch.Tensor:
    """The tensor of a call, given as it is or as a list of one (PyTorch's lists were one for each GPU of a process)."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f'{name} of backend "{NAME}" takes one tensor of each rank, not {len(tensors)}')
    return tensors[0]


def only_list(name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The list of tensors of a call, as it is or as a list of one list; empty on ranks that bring nothing."""
    if not tensors or isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise ValueError(f'{name} of backend "{NAME}" takes one list of tensors of each rank, not {len(tensors)}')
    return list(tensors[0])


def operation(opts: Any, op: Any = None) -> Any:
    """The ReduceOp in what a caller gave: by name, in options, as it is, or nothing for a sum."""
    given = opts if op is None else op
    return dist.ReduceOp.SUM if given is None else getattr(given, "reduceOp", given)


def root_of(opts: Any, root: int | None = None) -> int:
    """The root in what a caller gave: by name, in options, as a number, or nothing for rank 0."""
    given = opts if root is None else root
    return 0 if given is None else getattr(given, "rootRank", given)


def not_offered(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f'backend "{NAME}" does not offer {what}; {instead}')
