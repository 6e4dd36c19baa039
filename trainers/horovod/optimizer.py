"""DistributedOptimizer: averages gradients during backward, or combines the updates of a step with Adasum.

A group of gradients is averaged as soon as backward has computed all of them.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from allreduce.errors import OptionError
from allreduce.process import malloc
from trainers.horovod import session
from trainers.horovod.arguments import check_reduction, operation
from trainers.horovod.calls import synchronize
from trainers.horovod.collectives import (
    Adasum,
    Average,
    Max,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from trainers.horovod.compression import Compression, Compressor, check_compressor
from trainers.horovod.errors import OrderError, warn_deprecated
from trainers.horovod.session import ProcessSet, global_process_set

Group = tuple[torch.Tensor, ...]

GROUP_BYTES_NAME = "HOROVOD_FUSION_THRESHOLD"  # in the environment, as Horovod has it
# a call costs as much as copying about 100 KiB; larger tensors are reduced without a copy
GROUP_BYTES = 1 << 20


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: "Iterable[tuple[str, torch.Tensor]] | None" = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: "int | Sequence[Sequence[torch.Tensor]] | None" = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, parameters and state, which averages gradients before each step.

    named_parameters: model.named_parameters(), with at least the optimizer's parameters. The names are those in errors
        and the timeline, and let ranks compute gradients in different orders.
    compression: how gradients are sent: Compression.none, fp16 or bf16.
    backward_passes_per_step: the number of backward passes whose gradients are summed before they are averaged.
    op: Average, Sum or Adasum. With Adasum the ranks' own changes are combined, so their optimizers' states differ, and
        groups and sparse_as_dense have no effect.
    gradient_predivide_factor: with Average, gradients are divided by it before the sum, and by size / factor after it.
    groups: the number of groups of gradients that are averaged together, or lists of parameters; those in no list are
        averaged one by one. By default neighbours are grouped up to 1 MiB, or HOROVOD_FUSION_THRESHOLD bytes of the
        environment (0: each by itself).
    sparse_as_dense: sparse gradients are averaged as dense ones.
    process_set: the ranks that average; on other ranks the optimizer is unchanged.

    A group is averaged as soon as backward has all of it; in the first step, when backward has ended. Raises
    OptionError.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise OptionError("gradient_predivide_factor needs op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise OptionError(f"backward_passes_per_step={backward_passes_per_step}: give 1 or more")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"DistributedOptimizer takes an optimizer of torch.optim, not {type(optimizer).__name__}")
    if num_groups:
        warn_deprecated("num_groups= is deprecated: use groups=")
    malloc.keep_freed_memory()
    averaging = Averaging(
        optimizer.param_groups,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups if groups is not None else (num_groups or None),
        sparse_as_dense,
        process_set,
    )
    return _with_class(optimizer, DistributedAdasum if op == Adasum else Distributed, averaging)


def _with_class(optimizer: torch.optim.Optimizer, part: "type[Distributed]", averaging: "Averaging") -> Any:
    """Return an optimizer with the same attributes, of a class derived from `part` and the optimizer's class."""
    kind: Any = type(type(optimizer).__name__, (part, type(optimizer)), {})
    made = kind.__new__(kind)
    # A scheduler may have replaced the plain optimizer's `step`; do not copy that.
    plain = {name: held for name, held in vars(optimizer).items() if name != "step"}
    made.__dict__.update(plain, _averaging=averaging)
    return made


_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): gradients are "
    "averaged again, which takes time. Call step in `with optimizer.skip_synchronize():`"
)


class Distributed(torch.optim.Optimizer):
    """Mixin that DistributedOptimizer adds to an optimizer's class."""

    _averaging: "Averaging"
    _synchronized = False
    _should_synchronize = True

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._averaging.names

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are summed for a step."""
        return self._averaging.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step. Call it between steps."""
        self._averaging.passes = passes
        self._averaging.begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; the gradients of these parameters are averaged as well."""
        super().add_param_group(param_group)
        self._averaging.add(self.param_groups[-1])

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._averaging.begin()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all gradients are averaged. Gradients that this rank has not computed count as zeros."""
        self._averaging.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager: `step` does not average gradients in the block, because `synchronize` has done it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients that are not averaged yet, and update. closure: computes gradients first."""

        def averaged() -> Any:
            assert closure is not None
            loss = closure()
            self._averaging.finish()
            return loss

        if closure is not None:
            return super().step(averaged)
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._averaging.under_way:
            raise OrderError(
                "optimizer.zero_grad() comes after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(): gradients are being averaged"
            )
        super().zero_grad(*args, **kwargs)


class DistributedAdasum(Distributed):
    """Mixin that DistributedOptimizer(op=hvd.Adasum) adds to an optimizer's class.

    Gradients and optimizer state (momentum, for example) are local to each rank. `step` combines the ranks' changes of
    each parameter with Adasum.
    """

    def synchronize(self) -> None:
        """Do nothing: gradients are local to each rank."""

    def skip_synchronize(self) -> Any:
        """Raise an OrderError, as in Horovod."""
        raise OrderError("with op=hvd.Adasum optimizer.step() itself communicates: there is nothing to skip")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, and combine the changes with those of all ranks. closure: computes the gradients. Collective."""
        return self._averaging.combine(self.param_groups, lambda: super(Distributed, self).step(closure))


class Averaging:
    """Averages the gradients of one optimizer; its arguments are those of DistributedOptimizer.

    With op=Adasum there are no groups of gradients to average; `combine` combines the changes of a step instead.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: "Iterable[tuple[str, torch.Tensor]] | None",
        compression: type[Compressor] | Compressor,
        passes: int,
        op: int,
        predivide: float,
        groups: "int | Sequence[Sequence[torch.Tensor]] | None",
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names = names_of(param_groups, named_parameters)
        self.passes = passes
        check_compressor(compression)
        self._compression, self._op, self._sparse_as_dense = compression, operation(op, None), sparse_as_dense
        self._scales = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._process_set = process_set
        trained = _trained(param_groups)
        check_reduction("DistributedOptimizer", self._op, trained)
        self._active = bool(process_set.included()) and session.size() > 1
        self._groups_given = groups is not None
        self._groups: list[Group] = []
        self._group_of: dict[torch.Tensor, Group] = {}
        # parameter -> number of backward passes before its gradient is averaged
        self._passes_left: dict[torch.Tensor, int] = {}
        self._handles: dict[Group, Any] = {}
        self._complete = False  # whether a group waits for `finish`, because a layout in it is not known
        # Of parameters that some rank has used: the sparse dimensions of their gradients; 0: dense.
        self._layouts: dict[torch.Tensor, int] = {}
        self._learned_from: Any = None
        if self._op != Adasum:
            self._register(trained, _groups(trained, groups))

    def _register(self, trained: list[torch.Tensor], groups: list[Group]) -> None:
        """Average gradients in these groups from now on. Call it between steps."""
        self._groups += groups
        self._group_of.update((parameter, group) for group in groups for parameter in group)
        self.begin()
        if self._active:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def add(self, param_group: dict[str, Any]) -> None:
        """Average the gradients of these parameters, too, one by one. Call it between steps."""
        parameters = param_group["params"]
        self.names.update((each, f"added.{number}") for number, each in enumerate(parameters, len(self.names)))
        if self._op != Adasum:
            trained = _trained([param_group])
            self._register(trained, [(each,) for each in trained])

    @property
    def under_way(self) -> bool:
        """Whether gradients are being averaged, or wait to be averaged."""
        return bool(self._handles) or self._complete

    def begin(self) -> None:
        """Expect the gradients of a new step. Averages that have begun are dropped."""
        self._passes_left = dict.fromkeys(self._group_of, self.passes)
        self._handles, self._complete = {}, False

    def finish(self) -> None:
        """Average the groups that have not begun, missing gradients as zeros, and wait for all. Collective."""
        if not self._active:
            return
        self._learn_layouts()
        for group in list(self._groups):
            if group not in self._handles:
                self._submit(group)
        try:
            for group, handle in self._handles.items():
                self._store_averages(group, handle)
        finally:
            self.begin()

    def _ready(self, parameter: torch.Tensor) -> None:
        """Autograd hook: count a backward pass of `parameter`; start the average of its group when all are complete."""
        if self._passes_left[parameter] <= 0:
            raise OrderError(
                f"the gradient of {self.names[parameter]} was computed more than {self.passes} times before "
                "optimizer.step(): give DistributedOptimizer backward_passes_per_step to add several up"
            )
        self._passes_left[parameter] -= 1
        group = self._group_of[parameter]
        if not any(self._passes_left[each] for each in group):
            if self._unknown(group):
                self._complete = True
            else:
                self._submit(group)

    def _unknown(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose gradients' layouts are to be learned; the same on all ranks. Local."""
        if self._sparse_as_dense:
            return []
        members = session.members(self._process_set)
        if self._learned_from != (members, members.joins):  # a rank that had joined has learned nothing meanwhile
            self._layouts, self._learned_from = {}, (members, members.joins)
        return [each for each in parameters if each not in self._layouts]

    def _learn_layouts(self) -> None:
        """Learn from the other ranks which gradients are sparse. Collective, until each parameter was used once.

        A rank that does not use an embedding in a step can't see that the other ranks average it by itself.
        """
        unknown = self._unknown(self._group_of)
        if not unknown:
            return
        mine = [0 if each.grad is None else 1 + each.grad.is_sparse * each.grad.sparse_dim() for each in unknown]
        name = f"layouts.{self.names[unknown[0]]}"
        (found,) = synchronize(
            grouped_allreduce_async_([torch.tensor(mine)], None, name, Max, process_set=self._process_set)
        )
        for parameter, number in zip(unknown, found.tolist(), strict=True):
            if number:
                self._layouts[parameter] = number - 1

    def _submit(self, group: Group) -> None:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = _zeros(parameter, self._layouts.get(parameter, 0))
        name = self.names[group[0]]
        gradients = [_gradient(parameter) for parameter in group]
        if len(group) == 1 and gradients[0].is_sparse and not self._sparse_as_dense:
            self._handles[group] = sparse_allreduce_async(gradients[0], name, self._op, self._process_set)
            return
        if any(each.is_sparse for each in gradients) and not self._sparse_as_dense:
            if not self._groups_given:
                self._split_sparse(group)
                return
            raise OptionError(f"the group of {name} has sparse gradients: give sparse_as_dense=True, or no groups")
        dense = [each.to_dense() if each.is_sparse else each for each in gradients]
        short, contexts = zip(*map(self._compression.compress, dense), strict=True)
        before, after = self._scales
        handle = grouped_allreduce_async_(short, None, name, self._op, before, after, self._process_set)
        self._handles[group] = handle, contexts

    def _split_sparse(self, group: Group) -> None:
        """Split a group with sparse gradients: each sparse gradient becomes a group of its own."""
        parts: list[Group] = [(each,) for each in group if _gradient(each).is_sparse]
        if dense := tuple(each for each in group if not _gradient(each).is_sparse):
            parts.append(dense)
        at = next(at for at, each in enumerate(self._groups) if each is group)  # tensors have no plain ==
        self._groups[at : at + 1] = parts
        for part in parts:
            self._group_of.update(dict.fromkeys(part, part))
            self._submit(part)

    def _store_averages(self, group: Group, handle: Any) -> None:
        """Wait for the averages of a group, and store them in its gradients."""
        if callable(handle):
            group[0].grad = handle()
            return
        number, contexts = handle
        for parameter, average, context in zip(group, synchronize(number), contexts, strict=True):
            dense = self._compression.decompress(average, context)
            gradient = _gradient(parameter)
            if gradient.is_sparse:
                parameter.grad = dense.to_sparse(gradient.sparse_dim())
            elif dense.data_ptr() != gradient.data_ptr():
                gradient.copy_(dense)

    def combine(self, param_groups: list[dict[str, Any]], step: Callable[[], Any]) -> Any:
        """Call `step`, and replace its changes of the parameters by the Adasum of all ranks' changes. Collective."""
        trained = _trained(param_groups)
        if not self._active or not trained:
            return step()
        before = [parameter.detach().clone() for parameter in trained]
        returned = step()
        with torch.no_grad():
            changes = [parameter - old for parameter, old in zip(trained, before, strict=True)]
            short, contexts = zip(*map(self._compression.compress, changes), strict=True)
            name = f"adasum.{self.names[trained[0]]}"
            combined = synchronize(grouped_allreduce_async_(short, None, name, Adasum, process_set=self._process_set))
            for parameter, old, change, context in zip(trained, before, combined, contexts, strict=True):
                parameter.copy_(old + self._compression.decompress(change, context))
        return returned


def _zeros(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """Return a gradient of zeros, a sparse one without entries if it has sparse dimensions."""
    if not sparse_dim:
        return torch.zeros_like(parameter)
    places = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    entries = parameter.detach().new_empty((0, *parameter.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(places, entries, parameter.shape)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _trained(param_groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in param_groups for parameter in group["params"] if parameter.requires_grad]


def names_of(
    param_groups: list[dict[str, Any]], named: "Iterable[tuple[str, torch.Tensor]] | None"
) -> dict[torch.Tensor, str]:
    """The parameters' names, which must be unique. Raises OptionError."""
    own = [parameter for group in param_groups for parameter in group["params"]]
    if named is None:
        return {parameter: f"parameter.{number}" for number, parameter in enumerate(own)}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise OptionError("named_parameters are pairs of a name and a parameter: give model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"named_parameters has names twice: {', '.join(twice)}")
    found = {parameter: name for name, parameter in pairs}
    missing = [number for number, parameter in enumerate(own) if parameter not in found]
    if missing:
        raise OptionError(f"named_parameters lacks the parameters of the optimizer with the indices {missing}")
    return found


def _groups(trained: list[torch.Tensor], groups: "int | Sequence[Sequence[torch.Tensor]] | None") -> list[Group]:
    """The groups of gradients that are averaged together. Raises OptionError."""
    if groups is None:
        return _neighbours(trained)
    if isinstance(groups, int):
        if groups <= 0:
            raise OptionError(f"groups={groups}: give a number above 0, or lists of parameters")
        size = max(1, -(-len(trained) // groups))
        return [tuple(trained[first : first + size]) for first in range(0, len(trained), size)]
    members = [parameter for group in groups for parameter in group]
    if not all(isinstance(each, torch.Tensor) for each in members):
        raise OptionError("groups are lists of parameters")
    if len({id(each) for each in members}) < len(members):
        raise OptionError("groups: a parameter is in two of them")
    own = {id(each) for each in trained}
    grouped = [tuple(each for each in group if id(each) in own) for group in groups]
    taken = {id(each) for each in members}
    return [group for group in grouped if group] + [(each,) for each in trained if id(each) not in taken]


def _neighbours(trained: list[torch.Tensor]) -> list[Group]:
    """Group neighbours from the last parameter to the first, the order of backward. Raises OptionError."""
    given = os.environ.get(GROUP_BYTES_NAME, str(GROUP_BYTES))
    if not given.isdecimal():
        raise OptionError(f"{GROUP_BYTES_NAME}={given!r} in the environment: give a number of bytes, or 0")
    groups: list[Group] = []
    group: list[torch.Tensor] = []
    held = 0
    for parameter in reversed(trained):
        nbytes = parameter.numel() * parameter.element_size()
        if group and held + nbytes > int(given):
            groups.append(tuple(group))
            group, held = [], 0
        group.append(parameter)
        held += nbytes
    return [*groups, tuple(group)] if group else groups
