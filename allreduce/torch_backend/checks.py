"""Normalizes and checks the arguments of a call. Errors are raised on this rank, before anything is sent.

Every error names the call (`name`) and the values that the user gave.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "allreduce"
Tensors = torch.Tensor | Sequence[torch.Tensor]

# The forms in which users and PyTorch's layers pass the same arguments


def single_tensor(name: str, tensors: Tensors) -> torch.Tensor:
    """Return the one tensor of a call, which may come in a list of one (older PyTorch: one for each GPU)."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f'{name} of backend "{NAME}" takes one tensor of each rank, not {len(tensors)}')
    return tensors[0]


def single_list(name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the list of tensors of a call, which may come in a list of one; empty on ranks that give no list."""
    if not tensors or isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise ValueError(f'{name} of backend "{NAME}" takes one list of tensors of each rank, not {len(tensors)}')
    return list(tensors[0])


def operation(opts: Any, op: Any = None) -> Any:
    """Return the ReduceOp: `op`, else from `opts` (an options object or the operation), else SUM."""
    given = opts if op is None else op
    return dist.ReduceOp.SUM if given is None else getattr(given, "reduceOp", given)


def root_of(name: str, opts: Any, root: int | None, ranks: int) -> int:
    """Return `root`, else the root in `opts` (an options object or a number), else 0. ValueError if not a rank."""
    given = opts if root is None else root
    number = 0 if given is None else getattr(given, "rootRank", given)
    check_member(name, number, ranks, "root")
    return number


# Checks


def not_offered(feature: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f'backend "{NAME}" does not offer {feature}; {instead}')


def check_member(name: str, rank: int, ranks: int, role: str = "rank") -> None:
    """`rank` must be a rank of the group."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{name}: {role} {rank} is not a rank of the group, which has the ranks 0 to {ranks - 1}")


def check_devices(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Tensors must have memory, be dense, or sparse in all_reduce, and on CPUs or CUDA devices."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # PyTorch does not ask it, since the group is written in Python
            raise NotImplementedError(
                f'{name} of backend "{NAME}" takes no {type(tensor).__name__}, which wraps other tensors: pass these'
            )
        if tensor.layout != torch.strided and not (name == "all_reduce" and tensor.is_sparse):
            raise NotImplementedError(
                f'{name} of backend "{NAME}" does not take {tensor.layout} tensors; convert with to_dense()'
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f'{name} of backend "{NAME}" takes CPU and CUDA tensors, not {tensor.device}')


def check_same_dtype(name: str, output: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Inputs and output must have one dtype: bits are moved, not converted."""
    for source in sources:
        if source.dtype != output.dtype:
            raise TypeError(f"{name}: the input is {source.dtype} and the output {output.dtype}; convert one of them")


def check_one_dtype(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Tensors that travel together must have one dtype."""
    if not tensors:
        raise ValueError(f"{name}: no tensor was given; give one or more")
    kinds = dict.fromkeys(str(tensor.dtype) for tensor in tensors)
    if len(kinds) > 1:
        raise ValueError(f"{name}: the tensors are {', '.join(kinds)}; call it once for each dtype")


def check_count(name: str, tensors: Sequence[object], wanted: int, places: str = "ranks") -> None:
    """There must be one tensor for each of the `wanted` places, and at least one."""
    if len(tensors) != wanted or not wanted:
        raise ValueError(f"{name}: {len(tensors)} tensors were given for {wanted} {places}; give one for each")


def check_list(name: str, tensors: Sequence[torch.Tensor], ranks: int, rank: int, own: torch.Tensor) -> None:
    """A list must have one tensor for each rank; this rank's must fit `own`, from or to which it is copied."""
    check_count(name, tensors, ranks)
    for tensor in tensors:
        if tensor.dtype != own.dtype:
            raise TypeError(f"{name}: this rank's tensor is {own.dtype} and another is {tensor.dtype}; convert one")
    if tensors[rank].nbytes != own.nbytes:
        raise ValueError(
            f"{name}: this rank's tensor has shape {tuple(own.shape)}, but its entry in the list "
            f"{tuple(tensors[rank].shape)}"
        )


def check_scatter(name: str, output: torch.Tensor, inputs: Sequence[torch.Tensor], ranks: int, rank: int) -> None:
    """A reduce_scatter takes an input for each rank, or a single one that can be cut into equal parts."""
    check_same_dtype(name, output, inputs)
    if len(inputs) == 1:
        length = inputs[0].numel()
        if length % ranks:
            raise ValueError(f"{name}: {length} elements can't be split evenly among {ranks} ranks")
        share = length // ranks
    else:
        check_count(name, inputs, ranks)
        share = inputs[rank].numel()
    if share != output.numel():
        raise ValueError(f"{name}: the output has {output.numel()} elements and this rank's share of the input {share}")


def check_gather(name: str, output: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
    """The output must have room for every rank's `source`."""
    check_same_dtype(name, output, [source])
    if output.numel() != source.numel() * ranks:
        raise ValueError(
            f"{name}: {ranks} ranks with {source.numel()} elements each fill {source.numel() * ranks} elements, and "
            f"the output has {output.numel()}"
        )


def split_lengths(
    name: str,
    output: torch.Tensor,
    source: torch.Tensor,
    output_rows: Sequence[int],
    source_rows: Sequence[int],
    ranks: int,
) -> tuple[list[int], list[int]]:
    """Check an all_to_all_single; return the elements received from each rank and sent to each rank."""
    check_same_dtype(name, output, [source])
    if not output_rows and not source_rows and output.numel() != source.numel():
        raise ValueError(
            f"{name}: the input has {source.numel()} elements and the output {output.numel()}; give the split sizes"
        )
    return _slices(name, "output", output, output_rows, ranks), _slices(name, "input", source, source_rows, ranks)


def _slices(name: str, role: str, tensor: torch.Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """The elements of each rank's slice of `tensor`: as many rows as `rows` says, or equal slices where it is empty."""
    if not rows:
        if tensor.numel() % ranks:
            raise ValueError(
                f"{name}: the {role} has {tensor.numel()} elements, which can't be split evenly among {ranks} ranks; "
                "give the split sizes"
            )
        return [tensor.numel() // ranks] * ranks
    length = tensor.shape[0] if tensor.dim() else 1
    if len(rows) != ranks or sum(rows) != length or min(rows) < 0:
        raise ValueError(
            f"{name}: the {role} has {length} rows, and the split sizes {list(rows)} don't divide them among "
            f"{ranks} ranks"
        )
    return [each * (tensor.numel() // length if length else 0) for each in rows]
