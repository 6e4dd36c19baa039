"""The asynchronous collectives: they check arguments and submit calls. calls.py does the work.

All are local and return a handle at once. A name stands for the same call on all ranks of the process set, which may
come to their names in any order; calls of a kind without a name are matched by their number. What a call reads must
not change before it has ended. An argument that makes no sense is an ArgumentError (a ValueError) here; ranks that
differ are a MismatchError of all of them in `synchronize`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from allreduce.messages.named import Side
from allreduce.torch_backend.reduce import Reduction, sparse_all_reduce
from trainers.horovod import arguments, calls, session
from trainers.horovod.arguments import Op
from trainers.horovod.calls import Members, submit, synchronize
from trainers.horovod.errors import AdasumError, ArgumentError, internal
from trainers.horovod.session import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = Op


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor of the same shape and dtype on all ranks into a new one.

    op: Average by default. average: Horovod's old argument for Average and Sum. prescale_factor, postscale_factor: by
    which tensors are multiplied before and after.
    """
    arguments.tensors("allreduce", [tensor])
    return allreduce_async_(tensor.detach().clone(), average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce in place."""
    scales = prescale_factor, postscale_factor
    return _reduce("allreduce", [tensor], arguments.operation(op, average), name, scales, process_set, single=True)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors in one call, into new ones."""
    arguments.tensors("grouped_allreduce", tensors)
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors in one call, in place."""
    scales = prescale_factor, postscale_factor
    op = arguments.operation(op, average)
    return _reduce("grouped_allreduce", tensors, op, name, scales, process_set, single=False)


def _reduce(
    kind: str,
    tensors: Sequence[torch.Tensor],
    op: Op,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    single: bool,
) -> int:
    members = session.members(process_set)
    arguments.tensors(kind, tensors)
    arguments.reduces(kind, op, tensors)
    scales = arguments.factors(kind, scales)
    layouts = [arguments.layout(tensor) for tensor in tensors]
    what = f"{arguments.shown(tensors)}; {op.name}, {scales}"
    alike = f"{tensors[0].dtype} on {tensors[0].device.type}; {op.name}, {scales}"
    fusion_key = alike if single and op != Adasum else ""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    side = Side([kind, layouts, int(op), *scales], None, True, what, fusion_key, nbytes)
    work = calls.Reducing(members, tensors, op, scales, single)
    return submit(members, members.name(kind, name), side, tensors, work)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Join the tensors of all ranks along the first dimension, in which alone they may differ."""
    return _gather("allgather", [tensor], name, process_set, single=True)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `allgather_async`, of several tensors in one call."""
    return _gather("grouped_allgather", tensors, name, process_set, single=False)


def _gather(kind: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, single: bool) -> int:
    members = session.members(process_set)
    arguments.tensors(kind, tensors, rows=True)
    sources = [tensor.detach() for tensor in tensors]
    same = [kind, [arguments.row_layout(tensor) for tensor in tensors]]
    side = Side(same, [len(tensor) for tensor in tensors], what=arguments.shown(tensors))

    def work(sides: Any) -> Any:
        rows = list(zip(*sides, strict=True))  # by tensor, then by rank
        outputs = [calls.all_gather(members, *pair) for pair in zip(sources, rows, strict=True)]
        return outputs[0] if single else tuple(outputs)

    return submit(members, members.name(kind, name), side, tensors, work)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A new tensor like that of rank `root_rank`, a number of the world in all process sets."""
    arguments.tensors("broadcast", [tensor])
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Overwrite a tensor by that of the root."""
    members = session.members(process_set)
    arguments.tensors("broadcast", [tensor])
    if root_rank not in members.ranks:
        raise ArgumentError(f"broadcast: root_rank={root_rank!r} is none of the ranks {members.ranks}")
    side = Side(
        ["broadcast", arguments.layout(tensor), int(root_rank)],
        what=f"{arguments.shown([tensor])} from rank {root_rank}",
    )

    def work(_: Any) -> torch.Tensor:
        members.mover.broadcast(tensor, members.ranks.index(root_rank))
        return tensor

    return submit(members, members.name("broadcast", name), side, [tensor], work)


def alltoall_async(
    tensor: torch.Tensor,
    splits: "torch.Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of a tensor to each rank, and receive theirs.

    splits: how many rows go to each rank, one after another; by default equally many. The result is a pair: the rows
    that came, in the order of the ranks, and how many came from each (int32, or the dtype of `splits`).
    """
    members = session.members(process_set)
    arguments.tensors("alltoall", [tensor], rows=True)
    mine = arguments.splits(tensor, splits, members.size)
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
    what = f"{arguments.shown([tensor])}, splits {mine}"
    side = Side(["alltoall", arguments.row_layout(tensor)], mine, what=what)
    source = tensor.detach()

    def work(sides: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = calls.all_to_all(members, source, sides)
        return output, torch.tensor(received, dtype=dtype)

    return submit(members, members.name("alltoall", name), side, [tensor], work)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce a tensor, of which every rank keeps its share of the rows: the first ranks one more where needed."""
    scales = prescale_factor, postscale_factor
    return _scatter("reducescatter", [tensor], name, op, process_set, scales, single=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As `reducescatter_async`, of several tensors in one call."""
    scales = prescale_factor, postscale_factor
    return _scatter("grouped_reducescatter", tensors, name, op, process_set, scales, single=False)


def _scatter(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    scales: tuple[float, float],
    single: bool,
) -> int:
    members = session.members(process_set)
    arguments.tensors(kind, tensors, rows=True)
    how = arguments.operation(op, None)
    if how == Adasum:
        raise AdasumError(f"{kind}: there is no Adasum of parts; use hvd.allreduce")
    arguments.reduces(kind, how, tensors)
    factors = arguments.factors(kind, scales)
    sources = [tensor.detach() for tensor in tensors]
    layouts = [arguments.layout(tensor) for tensor in tensors]
    side = Side([kind, layouts, int(how), *factors], what=f"{arguments.shown(tensors)}; {how.name}, {factors}")

    def work(_: Any) -> Any:
        outputs = [calls.reduce_scatter(members, source, how, factors) for source in sources]
        return outputs[0] if single else tuple(outputs)

    return submit(members, members.name(kind, name), side, tensors, work)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have come here."""
    members = session.members(process_set)
    name = members.name("barrier", None)
    synchronize(submit(members, name, Side("barrier", what="hvd.barrier"), [], lambda _: None))


def join(device: int = -1) -> int:
    """Have no more data: stand in in the others' calls of allreduce until all ranks have joined. Collective.

    What this rank brings is zeros for sums and averages (which are still divided by all ranks), and what changes
    nothing for other operations. Other collectives are a MismatchError meanwhile. Returns the rank that joined last.
    device: Horovod's; of no use here.
    """
    came: list[int] = []
    members = session.members(global_process_set)
    try:
        members.lane.join(came.append).wait()
    except Exception as error:
        raise internal(error) from error
    members.begin_numbers()
    return came[0]


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
    sparse_all_reduce(members.reducer.backend(), result, Reduction("mean" if op == Average else "sum"))
    return result
