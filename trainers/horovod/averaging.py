"""Gradients are averaged while backward goes on: each, or each group, as soon as all of it is there."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainers.horovod import session
from trainers.horovod.arguments import fusion_bytes, operation, reduces
from trainers.horovod.compression import Compressor
from trainers.horovod.errors import ArgumentError, OrderError
from trainers.horovod.handles import synchronize
from trainers.horovod.operations import Average, grouped_allreduce_async_
from trainers.horovod.process_sets import ProcessSet
from trainers.horovod.sparse import sparse_allreduce_async

Group = tuple[torch.Tensor, ...]


class Averaging:
    """Of the gradients of one optimizer; see DistributedOptimizer."""

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: "Iterable[tuple[str, torch.Tensor]] | None",
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        groups: "int | Sequence[Sequence[torch.Tensor]] | None",
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        parameters = [parameter for group in param_groups for parameter in group["params"]]
        self.names = names_of(param_groups, named_parameters)
        self.passes = passes
        self._compression, self._op, self._sparse_as_dense = compression, operation(op, None), sparse_as_dense
        self._scales = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._process_set = process_set
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        reduces("DistributedOptimizer", self._op, learning)
        self._given = groups is not None
        self._groups = _groups(learning, groups)
        self._group_of = {parameter: group for group in self._groups for parameter in group}
        self._left: dict[torch.Tensor, int] = {}  # backward passes until it is averaged
        self._handles: dict[Group, Any] = {}
        self.begin()
        self._active = bool(process_set.included()) and session.size() > 1
        self._watch(learning)

    def _watch(self, learning: list[torch.Tensor]) -> None:
        if self._active:
            for parameter in learning:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def add(self, parameters: list[torch.Tensor]) -> None:
        """Average the gradients of these, too, each by itself. Between steps."""
        self.names.update((each, f"added.{number}") for number, each in enumerate(parameters, len(self.names)))
        learning = [each for each in parameters if each.requires_grad]
        self._groups += [(each,) for each in learning]
        self._group_of.update((each, (each,)) for each in learning)
        self.begin()
        self._watch(learning)

    @property
    def calls(self) -> int:
        """How many reductions a step has."""
        return len(self._groups)

    @property
    def under_way(self) -> bool:
        """Whether gradients are being averaged."""
        return bool(self._handles)

    def begin(self) -> None:
        """Expect the gradients of a new step; what is under way is forgotten."""
        self._left = dict.fromkeys(self._group_of, self.passes)
        self._handles = {}

    def finish(self) -> None:
        """Average what has not come, as zeros where there is nothing, and wait for all. Collective."""
        if not self._active:
            return
        for group in list(self._groups):
            if group not in self._handles:
                self._submit(group)
        try:
            for group, handle in self._handles.items():
                self._take(group, handle)
        finally:
            self.begin()

    def _ready(self, parameter: torch.Tensor) -> None:
        """Backward has added to the gradient of `parameter`."""
        if self._left[parameter] <= 0:
            raise OrderError(
                f"the gradient of {self.names[parameter]} was computed more than {self.passes} times before "
                "optimizer.step(): give DistributedOptimizer backward_passes_per_step to add several up"
            )
        self._left[parameter] -= 1
        group = self._group_of[parameter]
        if not any(self._left[each] for each in group):
            self._submit(group)

    def _submit(self, group: Group) -> None:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        name = self.names[group[0]]
        gradients = [_gradient(parameter) for parameter in group]
        if len(group) == 1 and gradients[0].is_sparse and not self._sparse_as_dense:
            self._handles[group] = sparse_allreduce_async(gradients[0], name, self._op, self._process_set)
            return
        if any(each.is_sparse for each in gradients) and not self._sparse_as_dense:
            if not self._given:
                self._part(group)
                return
            raise ArgumentError(f"the group of {name} has sparse gradients: give sparse_as_dense=True, or no groups")
        dense = [each.to_dense() if each.is_sparse else each for each in gradients]
        short, contexts = zip(*map(self._compression.compress, dense), strict=True)
        before, after = self._scales
        # A group of one, too: what is fused by the time at which it is ready may be rounded otherwise in the next run.
        handle = grouped_allreduce_async_(short, None, name, self._op, before, after, self._process_set)
        self._handles[group] = handle, contexts

    def _part(self, group: Group) -> None:
        """Of a group that was made here some gradients turn out to be sparse: these go by themselves from now on."""
        parts: list[Group] = [(each,) for each in group if _gradient(each).is_sparse]
        if dense := tuple(each for each in group if not _gradient(each).is_sparse):
            parts.append(dense)
        at = self._groups.index(group)
        self._groups[at : at + 1] = parts
        for part in parts:
            self._group_of.update(dict.fromkeys(part, part))
            self._submit(part)

    def _take(self, group: Group, handle: Any) -> None:
        """Wait, and put averages into gradients."""
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


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def names_of(
    param_groups: list[dict[str, Any]], named: "Iterable[tuple[str, torch.Tensor]] | None"
) -> dict[torch.Tensor, str]:
    """The parameters' names, unique ones. Raises ArgumentError."""
    own = [parameter for group in param_groups for parameter in group["params"]]
    if named is None:
        return {parameter: f"parameter.{number}" for number, parameter in enumerate(own)}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError("named_parameters are pairs of a name and a parameter: give model.named_parameters()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"named_parameters has names twice: {', '.join(twice)}")
    found = {parameter: name for name, parameter in pairs}
    missing = [number for number, parameter in enumerate(own) if parameter not in found]
    if missing:
        raise ArgumentError(f"named_parameters lacks parameters of the optimizer: those with the numbers {missing}")
    return found


def _groups(learning: list[torch.Tensor], asked: "int | Sequence[Sequence[torch.Tensor]] | None") -> list[Group]:
    """Which gradients are averaged together. Raises ArgumentError."""
    if asked is None:
        return _fused(learning, fusion_bytes())
    if isinstance(asked, int):
        if asked <= 0:
            raise ArgumentError(f"groups={asked}: give a number above 0, or lists of parameters")
        size = max(1, -(-len(learning) // asked))
        return [tuple(learning[first : first + size]) for first in range(0, len(learning), size)]
    members = [parameter for group in asked for parameter in group]
    if not all(isinstance(each, torch.Tensor) for each in members):
        raise ArgumentError("groups are lists of parameters")
    if len({id(each) for each in members}) < len(members):
        raise ArgumentError("groups: a parameter is in two of them")
    own = {id(each) for each in learning}
    grouped = [tuple(each for each in group if id(each) in own) for group in asked]
    taken = {id(each) for each in members}
    return [group for group in grouped if group] + [(each,) for each in learning if id(each) not in taken]


def _fused(learning: list[torch.Tensor], threshold: int) -> list[Group]:
    """Neighbours of `threshold` bytes together, in the order in which backward comes to them: from the last one on."""
    groups: list[Group] = []
    group: list[torch.Tensor] = []
    held = 0
    for parameter in reversed(learning):
        nbytes = parameter.numel() * parameter.element_size()
        if group and held + nbytes > threshold:
            groups.append(tuple(group))
            group, held = [], 0
        group.append(parameter)
        held += nbytes
    return [*groups, tuple(group)] if group else groups
