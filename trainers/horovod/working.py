"""What a collective does when all ranks have come to it: in the thread of the topology's worker."""

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allreduce.messages.named import Sides
from allreduce.torch_backend import gpu
from allreduce.torch_backend.reduce_ops import Reduction, resolve
from allreduce.torch_backend.tensors import readable, writable

if TYPE_CHECKING:
    from trainers.horovod.members import Members


class Op(enum.IntEnum):
    """Reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


_OPS = {
    Op.Average: dist.ReduceOp.AVG,
    Op.Sum: dist.ReduceOp.SUM,
    Op.Min: dist.ReduceOp.MIN,
    Op.Max: dist.ReduceOp.MAX,
    Op.Product: dist.ReduceOp.PRODUCT,
}
_Scales = tuple[float, float]  # before and after a reduction


def reduction(op: Op, dtype: torch.dtype) -> Reduction:
    """How tensors of a dtype are reduced. Raises TypeError or NotImplementedError for those that can't be."""
    return resolve(_OPS[op], dtype)


def all_reduce(members: "Members", tensors: Sequence[torch.Tensor], op: Op, scales: _Scales) -> None:
    """Reduce tensors in place, those of one dtype together; by Adasum each by itself."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        for tensor in group:
            _scale(tensor, scales[0])
        if op == Op.Adasum:
            for tensor in group:
                members.reducer.adasum(tensor)
        elif len(group) == 1:
            members.reducer.all_reduce(group[0], reduction(op, dtype))
        else:
            members.reducer.all_reduce_many(group, reduction(op, dtype))
        for tensor in group:
            _scale(tensor, scales[1])


@dataclass(frozen=True)
class Reducing:
    """The work of an allreduce. single: the result is a tensor, not a tuple of them."""

    members: "Members"
    tensors: Sequence[torch.Tensor]
    op: Op
    scales: _Scales
    single: bool = False

    def __call__(self, _: Sides) -> Any:
        all_reduce(self.members, self.tensors, self.op, self.scales)
        return self.result()

    def result(self) -> Any:
        """The tensors, which are reduced in place."""
        return self.tensors[0] if self.single else tuple(self.tensors)


class Run:
    """A call as the worker runs it: between what the caller has on its GPU, into `result`. record: told when it began.

    Calls whose work is a Reducing, alike but for its tensors, can run as one.
    """

    def __init__(
        self,
        work: Callable[[Sides], Any],
        tensors: Sequence[torch.Tensor],
        record: Callable[[float], object] | None = None,
    ) -> None:
        self._work, self._record, self._streams = work, record, gpu.Streams(tensors)
        self.result: Any = None

    def __call__(self, sides: Sides) -> None:
        with self._around():
            self.result = self._work(sides)

    def together(self, others: "Sequence[Run]") -> None:
        """Run as one with these."""
        runs = [self, *others]
        works: list[Reducing] = [run._work for run in runs]  # type: ignore[misc]
        with ExitStack() as around:
            for run in runs:
                around.enter_context(run._around())
            replace(works[0], tensors=[tensor for work in works for tensor in work.tensors])([])
            for run, work in zip(runs, works, strict=True):
                run.result = work.result()

    @contextmanager
    def _around(self) -> Iterator[None]:
        begin = time.perf_counter()
        self._streams.before()
        yield
        self._streams.after()
        if self._record is not None:
            self._record(begin)


def reduce_scatter(members: "Members", tensor: torch.Tensor, op: Op, scales: _Scales) -> torch.Tensor:
    """This rank's rows of the reduced tensor: the first ranks have one more where they can't be shared evenly."""
    source = tensor.clone() if scales[0] != 1.0 else tensor
    _scale(source, scales[0])
    parts = list(source.split(shares(len(tensor), members.size)))
    output = torch.empty_like(parts[members.rank], memory_format=torch.contiguous_format)
    members.reducer.reduce_scatter(output, parts, reduction(op, tensor.dtype))
    _scale(output, scales[1])
    return output


def shares(rows: int, ranks: int) -> list[int]:
    """How many rows each rank has of a tensor that is scattered."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def all_gather(members: "Members", tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The ranks' tensors, `rows` of each, one after another."""
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    with writable(output) as place:
        members.mover.all_gather(list(place.split(list(rows))), tensor)
    return output


def all_to_all(
    members: "Members", tensor: torch.Tensor, splits: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """What the ranks have sent to this one, and how many rows of each. splits[r][s]: rows from rank r to s."""
    received = [row[members.rank] for row in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    width = tensor.element_size() * tensor.new_empty((1, *tensor.shape[1:]), device="meta").numel()
    sizes = [[width * rows for rows in each] for each in (received, splits[members.rank])]
    members.mover.all_to_all_single(output, readable(tensor)[: sum(splits[members.rank])], *sizes)
    return output, received


def stand_in(members: "Members", same: Any) -> Run:
    """What a rank does that has joined: it brings what changes nothing. same: see operations.allreduce_async."""
    _, layouts, op, *scales = same
    tensors = [
        torch.full(shape, _neutral(Op(op), getattr(torch, dtype)), dtype=getattr(torch, dtype))
        for shape, dtype in layouts
    ]
    return Run(Reducing(members, tensors, Op(op), (scales[0], scales[1])), [])


def _neutral(op: Op, dtype: torch.dtype) -> float | int:
    if op not in (Op.Min, Op.Max):
        return int(op == Op.Product)
    least = dtype if dtype != torch.bool else torch.uint8
    about = torch.finfo(least) if dtype.is_floating_point else torch.iinfo(least)
    return about.max if op == Op.Min else about.min


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place: short floats by way of float32, integers of float64."""
    if factor == 1.0:
        return
    tensor = tensor.detach()
    if tensor.dtype in (torch.float32, torch.float64) or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        wide = torch.float32 if tensor.dtype.is_floating_point else torch.float64
        tensor.copy_(tensor.to(wide) * factor)
