"""Sparse tensors are reduced by collecting their rows from all ranks."""

from collections.abc import Callable

import torch

from trainers.horovod.errors import ArgumentError
from trainers.horovod.handles import synchronize
from trainers.horovod.operations import Average, Op, Sum, allgather_async
from trainers.horovod.process_sets import ProcessSet, global_process_set
from trainers.horovod.session import members


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Add up, or average, sparse tensors (COO) of one shape on all ranks. A function that waits for the result."""
    if tensor.layout != torch.sparse_coo:
        raise ArgumentError(f"sparse_allreduce takes sparse tensors (torch.sparse_coo), not {tensor.layout}")
    if op not in (Average, Sum):
        raise ArgumentError(f"sparse_allreduce makes hvd.Sum and hvd.Average, not {Op(op).name}")
    mine = tensor.coalesce()
    indices = allgather_async(mine.indices().t().contiguous(), name and f"{name}.indices", process_set)
    values = allgather_async(mine.values(), name and f"{name}.values", process_set)

    def result() -> torch.Tensor:
        rows, found = synchronize(indices), synchronize(values)
        if op == Average:
            found = found / members(process_set).size
        return torch.sparse_coo_tensor(rows.t(), found, tensor.shape, check_invariants=False).coalesce()

    return result


def sparse_allreduce(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The reduction itself. Collective."""
    return sparse_allreduce_async(tensor, name, op, process_set)()
