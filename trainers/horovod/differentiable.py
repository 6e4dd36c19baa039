"""The collectives that wait for their result, with gradients where Horovod's have them.

Gradients are Horovod's: through an allgather or a broadcast the average of the ranks' gradients goes back, not their
sum; through an allreduce what the same allreduce makes of them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trainers.horovod import operations as asynchronous
from trainers.horovod import session
from trainers.horovod.calls import synchronize
from trainers.horovod.compression import Compression, Compressor
from trainers.horovod.operations import Average, Sum
from trainers.horovod.session import ProcessSet, global_process_set

_Tensors = tuple[torch.Tensor, ...]


class _Allreduce(torch.autograd.Function):
    """arguments: average, op, prescale factor, postscale factor, process set."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> _Tensors:
        ctx.arguments = arguments
        average, *rest = arguments
        if len(tensors) == 1:
            return (synchronize(asynchronous.allreduce_async(tensors[0], average, name, *rest)),)
        return synchronize(asynchronous.grouped_allreduce_async(tensors, average, name, *rest))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_Allreduce.apply(None, ctx.arguments, *gradients)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of a tensor over all ranks, Average by default; see operations.allreduce_async. Collective."""
    short, context = compression.compress(tensor)
    arguments = average, op, prescale_factor, postscale_factor, process_set
    return compression.decompress(_Allreduce.apply(name, arguments, short)[0], context)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The reductions of several tensors, in one call. Collective."""
    short = [compression.compress(tensor) for tensor in tensors]
    arguments = average, op, prescale_factor, postscale_factor, process_set
    reduced = _Allreduce.apply(name, arguments, *(tensor for tensor, _ in short))
    return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, short, strict=True)]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place. Collective."""
    scales = prescale_factor, postscale_factor
    return synchronize(asynchronous.allreduce_async_(tensor, average, name, op, *scales, process_set))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Tensors:
    """Reduce several tensors in place, in one call. Collective."""
    scales = prescale_factor, postscale_factor
    return synchronize(asynchronous.grouped_allreduce_async_(tensors, average, name, op, *scales, process_set))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> _Tensors:
        ctx.process_set, ctx.rows = process_set, [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        if len(tensors) == 1:
            return (synchronize(asynchronous.allgather_async(tensors[0], name, process_set)),)
        return synchronize(asynchronous.grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The rows of the averages that come from this rank's tensors."""
        mean = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        everyone = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        before = everyone[: session.members(ctx.process_set).rank].sum(0).tolist()
        return None, None, *(each.narrow(0, *span) for each, *span in zip(mean, before, ctx.rows, strict=True))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors joined along the first dimension, in which they may differ. Collective."""
    return _Allgather.apply(name, process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Tensors:
    """As `allgather`, of several tensors in one call. Collective."""
    return _Allgather.apply(name, process_set, *tensors)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        mean = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return mean if session.rank() == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor like that of rank `root_rank`, a number of the world in all process sets. Collective."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite a tensor by that of the root. Collective."""
    return synchronize(asynchronous.broadcast_async_(tensor, root_rank, name, process_set))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Every row's gradient goes back whence it came; rows that were not sent have none."""
        back, _ = synchronize(asynchronous.alltoall_async(gradient, ctx.received, None, ctx.process_set))
        rest = back.new_zeros((ctx.rows - len(back), *back.shape[1:]))
        return torch.cat([back, rest]), None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: "torch.Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> "torch.Tensor | tuple[torch.Tensor, torch.Tensor]":
    """Send rows to each rank and receive theirs; with `splits`, how many came from each as well. Collective.

    See operations.alltoall_async.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


class _Reducescatter(torch.autograd.Function):
    """arguments: op, process set, prescale factor, postscale factor."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: tuple[Any, ...], *tensors: torch.Tensor) -> _Tensors:
        ctx.arguments = arguments
        if len(tensors) == 1:
            return (synchronize(asynchronous.reducescatter_async(tensors[0], name, *arguments)),)
        return synchronize(asynchronous.grouped_reducescatter_async(tensors, name, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, process_set, before, after = ctx.arguments
        factor = before * after * (session.members(process_set).size if op == Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *grouped_allgather(scaled, process_set=process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of a tensor over all ranks. Collective."""
    parts = [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter(*parts)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `reducescatter`, of several tensors in one call. Collective."""
    short = [compression.compress(tensor) for tensor in tensors]
    arguments = op, process_set, prescale_factor, postscale_factor
    reduced = _Reducescatter.apply(name, arguments, *(tensor for tensor, _ in short))
    return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, short, strict=True)]
