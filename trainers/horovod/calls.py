"""A collective call from its submission to its result, in this order: the ranks that make it, the call, its work."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from allreduce.call.announcements import PerRank, Request
from allreduce.call.queue import Future, Worker
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.torch_backend.move import TensorMover
from allreduce.torch_backend.reduce import Options, TensorReducer
from allreduce.torch_backend.tensors import Streams, readable, writable
from trainers.horovod import timeline
from trainers.horovod.arguments import Op, reduction
from trainers.horovod.errors import as_internal_error

__all__ = ["poll", "synchronize"]

Work = Callable[[PerRank], Sequence[Any]]
Scales = tuple[float, float]  # factors before and after a reduction


class Members:
    """The ranks of one process set, on a topology of their own. Creating it and `close` are collective over them.

    ranks: their numbers in the world, in the order of the topology.
    """

    def __init__(self, topology: Topology, ranks: Sequence[int]) -> None:
        self.topology, self.ranks = topology, list(ranks)
        self.rank, self.size = topology.rank, topology.size
        made = topology.split(0, topology.ranks_per_node)  # of the worker's thread; the main thread uses `topology`
        self._comm = made.private()
        self.reducer, self.mover = TensorReducer(made, self._comm, Options()), TensorMover(self._comm)
        self.queue = topology.service(Worker).queue(
            "the calls of Horovod's API", threaded=True, goes_on=True, join_proxy=partial(join_proxy, self)
        )
        self._counts: Counter[str] = Counter()
        self.joins = 0  # the number of times that all ranks have joined

    def name(self, kind: str, given: str | None) -> str:
        """The name of a call. An unnamed one gets its kind and its number among them, which is equal on all ranks."""
        if given is not None:
            return f"{kind}.{given}"
        self._counts[kind] += 1
        return f"{kind}.noname.{self._counts[kind]}"

    def reset_numbers(self) -> None:
        """Number unnamed calls from 1 again, because ranks that had joined made fewer. Local; call it on all ranks."""
        self._counts.clear()
        self.joins += 1

    def close(self) -> None:
        """Wait for the calls, then close the topology and all that uses it. Local if the queue is broken."""
        if self.queue.broken is not None:
            self.topology.abandon()
            return
        try:
            self.queue.close()
        except AllReduceError as error:
            self.topology.abandon()
            raise as_internal_error(error) from error
        self.reducer.close()
        self.topology.close()


class Call:
    """A call from its submission to its result. The worker's thread runs it, in order with the caller's GPU streams.

    work: work(all ranks' `own`) returns a list of results. grouped: the result is a tuple. name: in the timeline; "":
    not in it.
    """

    future: Future

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor] = (), grouped: bool = False, name: str = "") -> None:
        self.work, self.grouped = work, grouped
        self._name, self._streams = name, Streams(tensors)
        self.results: Sequence[Any] = ()

    def __call__(self, per_rank: PerRank) -> None:
        begin = time.perf_counter()
        self._streams.wait_for_caller()
        self.results = self.work(per_rank)
        self._streams.synchronize()
        if self._name:
            timeline.note(self._name, begin)

    def result(self) -> Any:
        """Wait for the call, and return its result or a tuple of them. Raises HorovodInternalError if it failed."""
        try:
            self.future.wait()
        except AllReduceError as error:
            raise as_internal_error(error) from error
        return tuple(self.results) if self.grouped else self.results[0]


_numbers = itertools.count()
_last = -1
_open: dict[int, Call] = {}  # handle -> call whose result has not been taken


def submit(
    members: Members,
    kind: str,
    name: str | None,
    request: Request,
    tensors: Sequence[torch.Tensor],
    work: Work,
    grouped: bool = False,
) -> int:
    """Submit `work`, which runs once all members have submitted this name. Returns a handle for `synchronize`. Local.

    Raises OptionError while a call of this name has not ended.
    """
    global _last
    full = members.name(kind, name)
    call = Call(work, tensors, grouped, full)
    call.future = members.queue.call(full, request._replace(description=f"{full}: {request.description}"), call)
    _last = next(_numbers)
    _open[_last] = call
    return _last


def poll(handle: int) -> bool:
    """Whether a call has ended, so that `synchronize` returns at once. Local."""
    return handle not in _open or _open[handle].future.done()


def synchronize(handle: int) -> Any:
    """Wait for a call, and return its result: a tensor or a tuple. Returns None if the handle was synchronized before.

    Raises HorovodInternalError when the call failed.
    """
    if not isinstance(handle, int) or not 0 <= handle <= _last:
        raise OptionError(f"{handle!r} is not a handle; asynchronous calls return handles")
    return _open.pop(handle).result() if handle in _open else None


def drop_handles() -> None:
    """Drop all handles, because their session has ended."""
    _open.clear()


def all_reduce(members: Members, tensors: Sequence[torch.Tensor], op: Op, scales: Scales) -> Sequence[torch.Tensor]:
    """Reduce tensors in place, those of one dtype together, but with Adasum one by one; return them."""
    reducer = members.reducer
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        for tensor in group:
            _scale(tensor, scales[0])
        if op == Op.Adasum:
            for tensor in group:
                reducer.adasum(tensor)
        elif len(group) == 1:
            reducer.all_reduce(group[0], reduction(op, dtype))
        else:
            reducer.all_reduce_many(group, reduction(op, dtype))
        for tensor in group:
            _scale(tensor, scales[1])
    return tensors


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; 16-bit floats are multiplied in float32, integers in float64."""
    if factor == 1.0:
        return
    tensor = tensor.detach()
    if tensor.dtype in (torch.float32, torch.float64) or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        wide = torch.float32 if tensor.dtype.is_floating_point else torch.float64
        tensor.copy_(tensor.to(wide) * factor)


def reduce_scatter(members: Members, tensor: torch.Tensor, op: Op, scales: Scales) -> torch.Tensor:
    """This rank's rows of the reduced tensor; the first ranks get one more if they don't divide evenly."""
    source = tensor.clone() if scales[0] != 1.0 else tensor
    _scale(source, scales[0])
    rows, ranks = len(tensor), members.size
    parts = list(source.split([rows // ranks + (rank < rows % ranks) for rank in range(ranks)]))
    output = torch.empty_like(parts[members.rank], memory_format=torch.contiguous_format)
    members.reducer.reduce_scatter(output, parts, reduction(op, tensor.dtype))
    _scale(output, scales[1])
    return output


def all_gather(members: Members, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The ranks' tensors, concatenated in rank order. rows: the number of rows of each."""
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    with writable(output) as view:
        members.mover.all_gather(list(view.split(list(rows))), tensor)
    return output


def all_to_all(
    members: Members, tensor: torch.Tensor, splits: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """The rows sent to this rank, and their number from each rank. splits[r][s]: the number of rows from r to s."""
    received = [row[members.rank] for row in splits]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    width = tensor.new_empty((1, *tensor.shape[1:]), device="meta").numel()
    sizes = [[width * rows for rows in each] for each in (received, splits[members.rank])]
    sent = readable(tensor)[: sum(splits[members.rank])]
    members.mover.all_to_all_single(output, sent, *sizes)
    return output, received


def join_proxy(members: Members, same: Any) -> Call:
    """Return the call that a joined rank makes in place of its own: its tensors are neutral in the reduction.

    same: the part of its Request that all ranks share; see `_allreduce` in module collectives.
    """
    _, layouts, op, *_ = same
    tensors = [
        torch.full(shape, _neutral(Op(op), getattr(torch, dtype)), dtype=getattr(torch, dtype))
        for shape, dtype in layouts
    ]
    # scaled, they would not be neutral
    return Call(lambda _: all_reduce(members, tensors, Op(op), (1.0, 1.0)))


def _neutral(op: Op, dtype: torch.dtype) -> float | int:
    if op not in (Op.Min, Op.Max):
        return int(op == Op.Product)
    if dtype.is_floating_point:
        return math.inf if op == Op.Min else -math.inf
    about = torch.iinfo(dtype if dtype != torch.bool else torch.uint8)
    return about.max if op == Op.Min else about.min
