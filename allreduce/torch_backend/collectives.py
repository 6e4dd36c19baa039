"""The collectives of a process group: their forms understood, their arguments checked, and then submitted."""

# What PyTorch's stubs say of these methods differs from version to version, and some have two forms at once.
# mypy: disable-error-code="override, assignment"

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from allreduce.torch_backend import checks, gpu, sparse
from allreduce.torch_backend.arguments import Tensors, only, only_list, operation, root_of
from allreduce.torch_backend.executor import Executor
from allreduce.torch_backend.moving import Mover
from allreduce.torch_backend.named_group import NamedGroup
from allreduce.torch_backend.reduce_ops import resolve
from allreduce.torch_backend.reducing import Reducer
from allreduce.torch_backend.untraced import untraced
from allreduce.torch_backend.work import Several, Work, counted, seconds


@untraced
class Collectives(NamedGroup):
    """Methods have the names and arguments by which torch.distributed, DDP's reducer (in C++), the functional
    collectives and users call them: `opts` are PyTorch's options for the call, or what they hold, as it is (an
    operation, a root, a time-out). Older names of the same call are kept for older versions of PyTorch. What makes
    no sense is refused at the call, so nothing is submitted.
    """

    _reducer: Reducer
    _mover: Mover
    _executor: Executor
    _timeout: float  # of an operation, in seconds
    _coalesced: list[Work] | None = None

    def _submit(
        self,
        name: str,
        written: Sequence[torch.Tensor],
        opts: Any,
        action: Callable[[], None],
        timeout: Any = None,
        read: Sequence[torch.Tensor] = (),
        alike: str = "",
    ) -> Work:
        """Have `action` executed after all that was submitted before.

        written, read: its tensors. opts, timeout: where a time-out for it may be given. alike: what of the call must
        be the same on all ranks, which is compared before it begins.
        """
        checks.devices(name, [*written, *read])
        streams = gpu.Streams([*written, *read])

        def run() -> None:
            streams.before()
            action()
            streams.after()

        limit = seconds(timeout or getattr(opts, "timeout", None), self._timeout)
        return self._bracketed(self._executor.submit(Work(name, written, limit, alike), run))

    # Coalescing, of the kind that brackets calls of any sort (batch_isend_irecv, DTensor)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _bracketed(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end_coalescing(self, device: Any = None) -> Work:
        members, self._coalesced = self._coalesced or [], None
        return Several("coalesced operations", members, self._timeout)

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        tensor = only("all_reduce", tensors)
        reduction = resolve(operation(opts, op), tensor.dtype)
        sparse.refuse("all_reduce", tensor, reduction)
        action = partial(self._reducer.all_reduce, tensor, reduction)
        return self._submit("all_reduce", [tensor], opts, action, timeout, alike=counted([tensor]))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        checks.one_dtype("all_reduce_coalesced", tensors)
        reduction = resolve(operation(opts), tensors[0].dtype)
        action = partial(self._reducer.all_reduce_many, tensors, reduction)
        return self._submit("all_reduce_coalesced", tensors, opts, action, alike=counted(tensors))

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        tensor, root = only("reduce", tensors), self._root("reduce", opts, root)
        reduction = resolve(operation(None if isinstance(opts, int) else opts, op), tensor.dtype)
        action = partial(self._reducer.reduce, tensor, root, reduction)
        alike = f"{counted([tensor])} to rank {root}"
        return self._submit("reduce", [tensor], opts, action, timeout, alike=alike)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        output, sources = only("reduce_scatter", outputs), only_list("reduce_scatter", inputs)
        checks.count("reduce_scatter", sources, self.size())
        return self._scattered("reduce_scatter", [output], [sources], operation(opts, op), timeout or opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._scattered("reduce_scatter_tensor", [output], [[source]], operation(opts), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        name = "reduce_scatter_tensor_coalesced"
        checks.pairs(name, outputs, sources)
        return self._scattered(name, outputs, [[source] for source in sources], operation(opts), opts)

    def _scattered(
        self, name: str, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], op: Any, opts: Any
    ) -> Work:
        """Reduce each of the outputs from its list of inputs."""
        for output, sources in zip(outputs, inputs, strict=True):
            checks.shares(name, output, sources, self.size(), self.rank())
        reductions = [resolve(op, output.dtype) for output in outputs]

        def action() -> None:
            for output, sources, reduction in zip(outputs, inputs, reductions, strict=True):
                self._reducer.reduce_scatter(output, sources, reduction)

        read = list(chain(*inputs))
        return self._submit(name, outputs, opts, action, read=read, alike=counted(read))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        tensor, root = only("broadcast", tensors), self._root("broadcast", opts, root)
        alike = f"{counted([tensor])} from rank {root}"
        return self._submit(
            "broadcast", [tensor], opts, partial(self._mover.broadcast, tensor, root), timeout, alike=alike
        )

    def allgather(self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        source, places = only("all_gather", inputs), only_list("all_gather", outputs)
        checks.places("all_gather", places, self.size(), self.rank(), source)
        action = partial(self._mover.all_gather, places, source)
        return self._submit("all_gather", places, opts, action, timeout, [source], counted(places))

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        name = "all_gather_coalesced"
        checks.one_dtype(name, sources)
        checks.count(name, outputs, self.size())
        for places in outputs:
            checks.pairs(name, places, sources)
        columns = [[places[index] for places in outputs] for index in range(len(sources))]
        for column, source in zip(columns, sources, strict=True):
            checks.places(name, column, self.size(), self.rank(), source)

        def action() -> None:
            for column, source in zip(columns, sources, strict=True):
                self._mover.all_gather(column, source)

        written = list(chain(*columns))
        return self._submit(name, written, opts, action, read=sources, alike=counted(written))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        return self._gathered("all_gather_into_tensor", [output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None
    ) -> Work:
        return self._gathered("all_gather_into_tensor_coalesced", outputs, sources, opts)

    def _gathered(self, name: str, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any) -> Work:
        """Fill each of the outputs from its source on every rank."""
        checks.pairs(name, outputs, sources)
        for output, source in zip(outputs, sources, strict=True):
            checks.gathered(name, output, source, self.size())

        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                self._mover.all_gather_single(output, source)

        return self._submit(name, outputs, opts, action, read=sources, alike=counted(sources))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Sequence[Any], inputs: Tensors, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        source, places = only("gather", inputs), only_list("gather", outputs)
        root = self._listed_at("gather", opts, root, places, source)
        action = partial(self._mover.gather, places, source, root)
        alike = f"{counted([source])} to rank {root}"
        return self._submit("gather", places, opts, action, timeout, [source], alike)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Any], opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        output, sources = only("scatter", outputs), only_list("scatter", inputs)
        root = self._listed_at("scatter", opts, root, sources, output)
        action = partial(self._mover.scatter, output, sources, root)
        alike = f"{counted([output])} from rank {root}"
        return self._submit("scatter", [output], opts, action, timeout, sources, alike)

    def alltoall(
        self, outputs: list[torch.Tensor], sources: list[torch.Tensor], opts: Any = None, timeout: Any = None
    ) -> Work:
        checks.count("all_to_all", sources, self.size())
        checks.places("all_to_all", outputs, self.size(), self.rank(), sources[self.rank()])
        checks.one_dtype("all_to_all", sources)
        action = partial(self._mover.all_to_all, outputs, sources)
        return self._submit("all_to_all", outputs, opts, action, timeout, sources, f" of {sources[0].dtype}")

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        sizes = checks.exchanged("all_to_all_single", output, source, output_splits, source_splits, self.size())
        action = partial(self._mover.all_to_all_single, output, source, *sizes)
        return self._submit("all_to_all_single", [output], opts, action, timeout, [source], f" of {source.dtype}")

    alltoall_base = all_to_all_single

    def _root(self, name: str, opts: Any, root: int | None) -> int:
        """The root that the caller gave, a rank of the group."""
        number = root_of(opts, root)
        checks.member(name, number, self.size(), "root")
        return number

    def _listed_at(self, name: str, opts: Any, root: int | None, tensors: list[torch.Tensor], own: torch.Tensor) -> int:
        """The root, which alone gives a list of tensors; `own` is to be, or to become, this rank's of them."""
        number = self._root(name, opts, root)
        checks.root_alone(name, tensors, number, self.rank())
        if self.rank() == number:
            checks.places(name, tensors, self.size(), self.rank(), own)
        return number
