"""What a call is refused for, before any rank is asked: each function names the call and what was given instead."""

from collections.abc import Sequence

import torch


def devices(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Only what some operation here takes."""
    for tensor in tensors:
        if tensor.layout != torch.strided and not (name == "all_reduce" and tensor.is_sparse):
            raise NotImplementedError(
                f'{name} of backend "allreduce" does not take {tensor.layout} tensors; convert with to_dense()'
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f'{name} of backend "allreduce" takes CPU and CUDA tensors, not {tensor.device}')


def member(name: str, rank: int, ranks: int, what: str = "rank") -> None:
    """A rank of the group, by its number there."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{name}: {what} {rank} is not a rank of the group, which has the ranks 0 to {ranks - 1}")


def dtypes(name: str, output: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """One dtype: bits are moved, not converted."""
    for source in sources:
        if source.dtype != output.dtype:
            raise TypeError(f"{name}: the input is {source.dtype} and the output {output.dtype}; convert one of them")


def places(name: str, tensors: Sequence[torch.Tensor], ranks: int, rank: int, own: torch.Tensor) -> None:
    """A list of one tensor for each rank, of which this rank's is to be, or to become, `own`."""
    count(name, tensors, ranks)
    for tensor in tensors:
        if tensor.dtype != own.dtype:
            raise TypeError(f"{name}: this rank's tensor is {own.dtype} and another is {tensor.dtype}; convert one")
    if tensors[rank].nbytes != own.nbytes:
        raise ValueError(
            f"{name}: this rank's tensor is {tuple(own.shape)} and its place in the list {tuple(tensors[rank].shape)}"
        )


def root_alone(name: str, tensors: Sequence[torch.Tensor], root: int, rank: int) -> None:
    """The list of a gather or scatter, which is empty on all ranks but the root."""
    if rank != root and tensors:
        raise ValueError(
            f"{name}: a list is given by the root alone, rank {root}; this is rank {rank}, with {len(tensors)} tensors"
        )


def count(name: str, tensors: Sequence[object], ranks: int) -> None:
    """One for each rank."""
    if len(tensors) != ranks:
        raise ValueError(f"{name}: {len(tensors)} tensors were given for {ranks} ranks; give one for each")


def shares(name: str, output: torch.Tensor, inputs: Sequence[torch.Tensor], ranks: int, rank: int) -> None:
    """The inputs of a reduce_scatter: one for each rank, or a single one that can be cut into equal parts."""
    dtypes(name, output, inputs)
    if len(inputs) == 1:
        length = inputs[0].numel()
        if length % ranks:
            raise ValueError(f"{name}: {length} elements can't be split evenly among {ranks} ranks")
        share = length // ranks
    else:
        count(name, inputs, ranks)
        share = inputs[rank].numel()
    if share != output.numel():
        raise ValueError(f"{name}: the output has {output.numel()} elements and this rank's share of the input {share}")


def gathered(name: str, output: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
    """An output that holds `source` of every rank."""
    dtypes(name, output, [source])
    if output.numel() != source.numel() * ranks:
        raise ValueError(
            f"{name}: {ranks} ranks with {source.numel()} elements each fill {source.numel() * ranks} elements, and "
            f"the output has {output.numel()}"
        )


def one_dtype(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """What is put together to be moved at once."""
    if not tensors:
        raise ValueError(f"{name}: no tensor was given; give one or more")
    kinds = dict.fromkeys(str(tensor.dtype) for tensor in tensors)
    if len(kinds) > 1:
        raise ValueError(f"{name}: the tensors are {', '.join(kinds)}; call it once for each dtype")


def pairs(name: str, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """An input for each output."""
    if len(outputs) != len(sources):
        raise ValueError(f"{name}: {len(outputs)} outputs and {len(sources)} inputs; give as many of both")
    if not outputs:
        raise ValueError(f"{name}: no tensor was given; give one or more")


def exchanged(
    name: str,
    output: torch.Tensor,
    source: torch.Tensor,
    output_rows: Sequence[int],
    source_rows: Sequence[int],
    ranks: int,
) -> tuple[list[int], list[int]]:
    """The bytes that come from each rank and those that go to it, in an exchange of slices."""
    dtypes(name, output, [source])
    if not output_rows and not source_rows and output.numel() != source.numel():
        raise ValueError(
            f"{name}: the input has {source.numel()} elements and the output {output.numel()}; give the split sizes"
        )
    return _slices(name, "output", output, output_rows, ranks), _slices(name, "input", source, source_rows, ranks)


def _slices(name: str, which: str, tensor: torch.Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """The bytes of each rank's slice of `tensor`: as many rows as `rows` says, or equal slices where it is empty."""
    if not rows:
        if tensor.numel() % ranks:
            raise ValueError(
                f"{name}: the {which} has {tensor.numel()} elements, which can't be split evenly among {ranks} ranks; "
                "give the split sizes"
            )
        return [tensor.nbytes // ranks] * ranks
    length = tensor.shape[0] if tensor.dim() else 1
    if len(rows) != ranks or sum(rows) != length or min(rows) < 0:
        raise ValueError(
            f"{name}: the {which} has {length} rows, and the split sizes {list(rows)} don't divide them among "
            f"{ranks} ranks"
        )
    return [each * (tensor.nbytes // length if length else 0) for each in rows]
