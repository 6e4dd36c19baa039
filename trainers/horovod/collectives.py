"""The collectives of Horovod's API. Each is declared once; `Form` makes Horovod's functions of a declaration.

A declaration checks the arguments of a call and submits it; module `calls` does the work. Calls with the same name
match on all ranks of the process set, in whatever order each rank makes them. Calls without a name match by kind and
sequence number. An invalid argument raises an OptionError (a ValueError) at once. When the ranks' arguments differ,
all ranks raise a HorovodInternalError, for an asynchronous call in `synchronize`.

Derivatives are Horovod's: the gradient of an allgather or a broadcast is the average of the ranks' gradients, not
their sum; the gradient of an allreduce is the same allreduce of the gradients.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from allreduce.call.announcements import Request
from allreduce.errors import OptionError
from allreduce.torch_backend.reduce import Reduction, sparse_all_reduce
from trainers.horovod import arguments, calls, session
from trainers.horovod.arguments import Op
from trainers.horovod.calls import submit, synchronize
from trainers.horovod.compression import Compression, Compressor, check_compressor
from trainers.horovod.errors import HorovodInternalError, as_internal_error
from trainers.horovod.session import ProcessSet, global_process_set

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum", "barrier", "join"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]
__all__ += ["sparse_allreduce_async"]

Average, Sum, Adasum, Min, Max, Product = Op


@dataclass(frozen=True)
class Form:
    """One form of a collective: of one tensor or of several ("grouped_..."), into new tensors or in place ("..._"). It
    makes Horovod's functions of this form.

    describe: describe(form, tensor, ...) checks the arguments and submits the call. The functions have its signature
        and its docstring; those of several tensors take `tensors` instead of `tensor`.
    backward: backward(ctx, gradients of the results) -> gradients of the tensors.
    overwrites: the work writes its result into its input tensors. compresses: whether the synchronous function of new
        tensors has an argument `compression`, after `name`.
    """

    describe: Callable[..., int]
    backward: Callable[[Any, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    overwrites: bool = False
    compresses: bool = False
    grouped: bool = False
    in_place: bool = False

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return "grouped_" * self.grouped + self.describe.__name__.removeprefix("_")

    def check_tensors(self, given: Any) -> list[torch.Tensor]:
        """The tensors of a call, as a list. Raises OptionError."""
        tensors = list(given) if self.grouped else [given]
        arguments.check_tensors(self.kind, tensors, rows=not self.overwrites)
        return tensors

    def input_tensors(self, given: Any) -> list[torch.Tensor]:
        """Return the tensors on which the call works: the caller's own, or copies that it may overwrite."""
        tensors = self.check_tensors(given)
        if self.in_place:
            return tensors
        return [tensor.detach().clone() if self.overwrites else tensor.detach() for tensor in tensors]

    def asynchronous(self) -> Callable[..., int]:
        """The function that returns a handle at once."""
        return self._function("_async", int, lambda given, options: self.describe(self, given, **options))

    def synchronous(self) -> Callable[..., Any]:
        """The function that waits for its result; if it returns new tensors, it is differentiable."""
        returns = Sequence[torch.Tensor] if self.grouped else torch.Tensor
        if self.in_place:
            run = lambda given, options: synchronize(self.describe(self, given, **options))  # noqa: E731
            return self._function("", returns, run)
        return self._function("", returns, self._new_tensors)

    def _new_tensors(self, given: Any, options: dict[str, Any]) -> Any:
        tensors = self.check_tensors(given)
        if self.compresses:
            compression = options.pop("compression")
            check_compressor(compression)
            short, contexts = zip(*map(compression.compress, tensors), strict=True)
            pairs = zip(self.wait(short, options), contexts, strict=True)
            results: Sequence[torch.Tensor] = [compression.decompress(*pair) for pair in pairs]
        else:
            results = self.wait(tensors, options)
        return results if self.grouped or len(results) > 1 else results[0]

    def wait(self, tensors: Sequence[torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Run a call and return its results, differentiable if a tensor requires a gradient. Collective."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return Differentiable.apply(self, options, *tensors)
        found = synchronize(self.describe(self, tensors if self.grouped else tensors[0], **options))
        return found if isinstance(found, tuple) else (found,)

    def _function(self, suffix: str, returns: Any, run: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """Return the function that users call: it calls run(the tensors, all other arguments by name)."""
        _, given, *rest = inspect.signature(self.describe).parameters.values()
        first, annotation = ("tensors", Sequence[torch.Tensor]) if self.grouped else ("tensor", torch.Tensor)
        parameters = [given.replace(name=first, annotation=annotation), *rest]
        if self.compresses and not (suffix or self.in_place):
            after_name, kinds = 1 + [each.name for each in parameters].index("name"), type[Compressor] | Compressor
            compression = given.replace(name="compression", default=Compression.none, annotation=kinds)
            parameters.insert(after_name, compression)
        signature = inspect.Signature(parameters, return_annotation=returns)

        def call(*args: Any, **options: Any) -> Any:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{call.__name__}() {error}") from None
            bound.apply_defaults()
            return run(bound.arguments.pop(first), bound.arguments)

        summary, _, more = (inspect.getdoc(self.describe) or "").partition("\n\n")
        effect = "Overwrites the tensors that it is given" if self.in_place else "Returns new tensors"
        if suffix:
            effect = f"{effect.replace('Returns', 'Makes')}. Returns a handle for `synchronize` and `poll` at once"
        call.__doc__ = f"{summary}\n\n{effect}. {'Local' if suffix else 'Collective'}.\n\n{more}".rstrip()
        call.__name__ = call.__qualname__ = f"{self.kind}{suffix}{'_' if self.in_place else ''}"
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


class Differentiable(torch.autograd.Function):
    """Autograd function of a synchronous call. ctx.rows: of each tensor. ctx.extra: results without a gradient."""

    @staticmethod
    def forward(ctx: Any, form: Form, options: dict[str, Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = form.wait(tensors, options)  # PyTorch records nothing in here
        ctx.form, ctx.options = form, options
        ctx.rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        ctx.extra = results[len(tensors) :]
        ctx.mark_non_differentiable(*ctx.extra)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.form.backward(ctx, gradients[: len(ctx.rows)])


def _allreduce(
    form: Form,
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors of the same shape and dtype over all ranks.

    op: Average by default. average: deprecated; use op. prescale_factor, postscale_factor: factors before and after the
    reduction.
    """
    members = session.members(process_set)
    tensors, how = form.input_tensors(tensor), arguments.operation(op, average)
    arguments.check_reduction(form.kind, how, tensors)
    scales = arguments.check_factors(form.kind, (prescale_factor, postscale_factor))
    request = Request(
        [form.kind, [arguments.layout(each) for each in tensors], int(how), *scales],
        joinable=True,
        description=f"{arguments.describe(tensors)}; {how.name}, {scales}",
    )

    def work(_: Any) -> Sequence[torch.Tensor]:
        return calls.all_reduce(members, tensors, how, scales)

    return submit(members, form.kind, name, request, tensors, work, form.grouped)


def _allreduce_backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return ctx.form.wait(gradients, {**ctx.options, "name": None})


_ALLREDUCE = Form(_allreduce, _allreduce_backward, overwrites=True, compresses=True)
allreduce = _ALLREDUCE.synchronous()
allreduce_ = replace(_ALLREDUCE, in_place=True).synchronous()
allreduce_async = _ALLREDUCE.asynchronous()
allreduce_async_ = replace(_ALLREDUCE, in_place=True).asynchronous()
grouped_allreduce = replace(_ALLREDUCE, grouped=True).synchronous()
grouped_allreduce_ = replace(_ALLREDUCE, grouped=True, in_place=True).synchronous()
grouped_allreduce_async = replace(_ALLREDUCE, grouped=True).asynchronous()
grouped_allreduce_async_ = replace(_ALLREDUCE, grouped=True, in_place=True).asynchronous()


def _allgather(form: Form, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenate the tensors of all ranks along the first dimension; all other dimensions must be equal."""
    members, tensors = session.members(process_set), form.input_tensors(tensor)
    same = [form.kind, [arguments.layout(each, rows=True) for each in tensors]]
    request = Request(same, [len(each) for each in tensors], description=arguments.describe(tensors))

    def work(per_rank: Any) -> list[torch.Tensor]:
        rows = zip(*per_rank, strict=True)  # by tensor, then by rank
        return [calls.all_gather(members, *pair) for pair in zip(tensors, rows, strict=True)]

    return submit(members, form.kind, name, request, tensors, work, form.grouped)


def _allgather_backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return this rank's rows of the averaged gradients."""
    process_set = ctx.options["process_set"]
    mean = grouped_allreduce(gradients, op=Average, process_set=process_set)
    everyone = allgather(torch.tensor([ctx.rows]), process_set=process_set)
    before = everyone[: session.members(process_set).rank].sum(0).tolist()
    return [each.narrow(0, *span) for each, *span in zip(mean, before, ctx.rows, strict=True)]


_ALLGATHER = Form(_allgather, _allgather_backward)
allgather = _ALLGATHER.synchronous()
allgather_async = _ALLGATHER.asynchronous()
grouped_allgather = replace(_ALLGATHER, grouped=True).synchronous()
grouped_allgather_async = replace(_ALLGATHER, grouped=True).asynchronous()


def _broadcast(
    form: Form, tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Copy the tensor of rank `root_rank` to all ranks of the process set. root_rank: a rank of the world."""
    members, (sent,) = session.members(process_set), form.input_tensors(tensor)
    if root_rank not in members.ranks:
        raise OptionError(f"broadcast: root_rank={root_rank!r} is not one of the ranks {members.ranks}")
    same = ["broadcast", arguments.layout(sent), int(root_rank)]

    def work(_: Any) -> list[torch.Tensor]:
        members.mover.broadcast(sent, members.ranks.index(root_rank))
        return [sent]

    request = Request(same, description=f"{arguments.describe([sent])} from rank {root_rank}")
    return submit(members, form.kind, name, request, [sent], work)


def _broadcast_backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    mean = allreduce(*gradients, op=Average, process_set=ctx.options["process_set"])
    return [mean if session.rank() == ctx.options["root_rank"] else torch.zeros_like(mean)]


_BROADCAST = Form(_broadcast, _broadcast_backward, overwrites=True)
broadcast = _BROADCAST.synchronous()
broadcast_ = replace(_BROADCAST, in_place=True).synchronous()
broadcast_async = _BROADCAST.asynchronous()
broadcast_async_ = replace(_BROADCAST, in_place=True).asynchronous()


def _alltoall(
    form: Form,
    tensor: Any,
    splits: "torch.Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of a tensor to each rank, and receive rows from each rank.

    splits: the number of rows for each rank, consecutive in the tensor; by default equal. The result is a pair: the
    received rows in rank order, and the number received from each rank (int32, or the dtype of `splits`).
    """
    members, (source,) = session.members(process_set), form.input_tensors(tensor)
    mine = arguments.check_splits(source, splits, members.size)
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def work(per_rank: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        output, received = calls.all_to_all(members, source, per_rank)
        return [(output, torch.tensor(received, dtype=dtype))]

    description = f"{arguments.describe([source])}, splits {mine}"
    request = Request(["alltoall", arguments.layout(source, rows=True)], mine, description=description)
    return submit(members, form.kind, name, request, [source], work)


def _alltoall_backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Send every row's gradient back to where the row came from; rows that were not sent have the gradient 0."""
    back, _ = synchronize(alltoall_async(*gradients, *ctx.extra, process_set=ctx.options["process_set"]))
    rest = back.new_zeros((ctx.rows[0] - len(back), *back.shape[1:]))
    return [torch.cat([back, rest])]


_ALLTOALL = Form(_alltoall, _alltoall_backward)
_alltoall_pair = _ALLTOALL.synchronous()
alltoall_async = _ALLTOALL.asynchronous()


def alltoall(
    tensor: torch.Tensor,
    splits: "torch.Tensor | Sequence[int] | None" = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> "torch.Tensor | tuple[torch.Tensor, torch.Tensor]":
    """Send rows to each rank and receive rows from each; with `splits`, also return how many came from each rank.

    Collective. See `alltoall_async`.
    """
    output, received = _alltoall_pair(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _reducescatter(
    form: Form,
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce tensors over all ranks; each rank gets its part of the rows, the first ranks one more if needed."""
    members, tensors = session.members(process_set), form.input_tensors(tensor)
    how = arguments.operation(op, None)
    if how == Adasum:
        raise HorovodInternalError(f"{form.kind} does not support Adasum; use hvd.allreduce")
    arguments.check_reduction(form.kind, how, tensors)
    scales = arguments.check_factors(form.kind, (prescale_factor, postscale_factor))
    same = [form.kind, [arguments.layout(each) for each in tensors], int(how), *scales]
    request = Request(same, description=f"{arguments.describe(tensors)}; {how.name}, {scales}")

    def work(_: Any) -> list[torch.Tensor]:
        return [calls.reduce_scatter(members, each, how, scales) for each in tensors]

    return submit(members, form.kind, name, request, tensors, work, form.grouped)


def _reducescatter_backward(ctx: Any, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    options, process_set = ctx.options, ctx.options["process_set"]
    factor = options["prescale_factor"] * options["postscale_factor"]
    if options["op"] == Sum:
        factor *= session.members(process_set).size
    return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)


_REDUCESCATTER = Form(_reducescatter, _reducescatter_backward, compresses=True)
reducescatter = _REDUCESCATTER.synchronous()
reducescatter_async = _REDUCESCATTER.asynchronous()
grouped_reducescatter = replace(_REDUCESCATTER, grouped=True).synchronous()
grouped_reducescatter_async = replace(_REDUCESCATTER, grouped=True).asynchronous()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this. Collective."""
    request = Request("barrier", description="hvd.barrier")
    synchronize(submit(session.members(process_set), "barrier", None, request, [], lambda _: [None]))


def join(device: int = -1) -> int:
    """Declare that this rank has no more data; it then takes part in allreduces until all have joined. Collective.

    Meanwhile this rank contributes zeros to sums and averages (averages are still divided by the number of all ranks),
    and neutral values to min, max and product. Other collectives raise HorovodInternalError. Returns the rank that
    joined last.
    device: ignored.
    """
    last: list[int] = []
    members = session.members(global_process_set)
    try:
        members.queue.join(last.append).wait()
    except Exception as error:
        raise as_internal_error(error) from error
    members.reset_numbers()
    return last[0]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Sum or average sparse COO tensors of one shape over all ranks, with any number of entries on each. Local.

    Returns a function that waits for the result, a new coalesced tensor.
    """
    members = session.members(process_set)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise OptionError("sparse_allreduce_async takes sparse tensors (torch.sparse_coo); hvd.allreduce, dense ones")
    if op not in (Average, Sum):
        raise OptionError(f"sparse_allreduce_async supports hvd.Sum and hvd.Average, not {op!r}")
    if not tensor.is_floating_point() and op == Average:
        raise OptionError(f"sparse_allreduce_async: there is no average of {tensor.dtype}")
    mine = tensor.detach()

    def work(_: Any) -> list[torch.Tensor]:
        result = mine.clone()
        sparse_all_reduce(members.reducer.backend(), result, Reduction("mean" if op == Average else "sum"))
        return [result]

    same = ["sparse", arguments.layout(tensor), tensor.sparse_dim(), int(op)]
    request = Request(same, description=f"{arguments.describe([tensor])}, sparse; {Op(op).name}")
    handle = submit(members, "sparse_allreduce", name, request, [tensor], work)
    return lambda: synchronize(handle)
