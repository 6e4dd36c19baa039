"""Sparse tensors: each rank brings some rows of a table, and all get the sums of all of them."""

from collections.abc import Callable

import torch

from allreduce.messages.named import Side
from allreduce.torch_backend.reduce_ops import Reduction
from allreduce.torch_backend.sparse import all_reduce
from trainers.horovod import arguments, session
from trainers.horovod.errors import ArgumentError
from trainers.horovod.handles import submit, synchronize
from trainers.horovod.members import Members
from trainers.horovod.operations import Average, Op, Sum
from trainers.horovod.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Add up, or average, sparse tensors (COO) of one shape on all ranks, with any number of entries on each.

    Returns a function that waits for the result, a new coalesced tensor.
    """
    members = session.members(process_set)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise ArgumentError("sparse_allreduce takes sparse tensors (torch.sparse_coo); hvd.allreduce takes dense ones")
    if op not in (Average, Sum):
        raise ArgumentError(f"sparse_allreduce makes hvd.Sum and hvd.Average, not {op!r}")
    if not tensor.is_floating_point() and op == Average:
        raise ArgumentError(f"sparse_allreduce: there is no average of {tensor.dtype}")
    same = ["sparse", arguments.layout(tensor), tensor.sparse_dim(), int(op)]
    what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, sparse; {Op(op).name}"
    mine = tensor.detach()
    full = members.name("sparse_allreduce", name)
    handle = submit(members, full, Side(same, what=what), [tensor], lambda _: _sum(members, mine, Op(op)))
    return lambda: synchronize(handle)


def sparse_allreduce(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The reduction itself. Collective."""
    return sparse_allreduce_async(tensor, name, op, process_set)()


def _sum(members: Members, tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """The sum or mean of all ranks' tensors. Collective."""
    result = tensor.clone()
    all_reduce(members.reducer.backend(), result, Reduction("mean" if op == Average else "sum"))
    return result
