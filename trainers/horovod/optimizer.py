"""DistributedOptimizer: an optimizer of PyTorch's that averages gradients over all ranks before its steps."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainers.horovod.averaging import Averaging
from trainers.horovod.compression import Compression, Compressor
from trainers.horovod.deltas import Deltas, DistributedAdasum
from trainers.horovod.errors import ArgumentError, OrderError, deprecated
from trainers.horovod.operations import Adasum, Average
from trainers.horovod.process_sets import ProcessSet, global_process_set

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): gradients are "
    "averaged again, which takes time. Call step in `with optimizer.skip_synchronize():`"
)


class Distributed(torch.optim.Optimizer):
    """The part that DistributedOptimizer adds to an optimizer's class."""

    _averaging: Averaging
    _synchronized = False
    _should_synchronize = True

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._averaging.names

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add up to the gradient of a step."""
        return self._averaging.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change it, between steps."""
        self._averaging.passes = passes
        self._averaging.begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; the gradients of these parameters are averaged as well."""
        super().add_param_group(param_group)
        self._averaging.add(self.param_groups[-1]["params"])

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._averaging.begin()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, those included that this rank has not computed: they are zeros."""
        self._averaging.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` averages nothing: `synchronize` has done it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what is not averaged yet, and update. closure: computes gradients, which are averaged as well."""

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


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: "Iterable[tuple[str, torch.Tensor]] | None" = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: "int | Sequence[Sequence[torch.Tensor]] | None" = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, with the same parameters and state, that steps by averaged gradients.

    named_parameters: of the model, so that errors and timelines have names, and ranks may differ in the order in which
        gradients are ready. They must name all parameters.
    backward_passes_per_step: gradients of so many backward passes add up before they are averaged.
    op: Average, or Sum. Adasum: every rank updates by its own gradients, and what the updates have changed is combined,
        each parameter's by itself; nothing is averaged in backward then, so groups and sparse_as_dense change nothing,
        and states of ranks differ.
    gradient_predivide_factor: with Average, what part of the division comes before the sum.
    groups: how many groups of gradients are averaged together, or which; all others go by themselves. By default
        neighbours go together up to 1 MiB, or HOROVOD_FUSION_THRESHOLD bytes of the environment (0: each by itself).
    sparse_as_dense: sparse gradients are averaged as dense ones.
    process_set: of the ranks that average; on others this is the plain optimizer.

    A group of gradients is averaged as soon as backward has all of it. Raises ArgumentError.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ArgumentError("gradient_predivide_factor goes with op=hvd.Average alone")
    if backward_passes_per_step <= 0:
        raise ArgumentError(f"backward_passes_per_step={backward_passes_per_step}: give 1 or more")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"DistributedOptimizer takes an optimizer of torch.optim, not {type(optimizer).__name__}")
    if num_groups:
        deprecated("num_groups is Horovod's old name of groups")
    if op == Adasum:
        deltas = Deltas(optimizer.param_groups, named_parameters, compression, backward_passes_per_step, process_set)
        return _remade(optimizer, DistributedAdasum, "_deltas", deltas)
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
    return _remade(optimizer, Distributed, "_averaging", averaging)


def _remade(optimizer: torch.optim.Optimizer, part: type, attribute: str, value: object) -> Any:
    """An optimizer of the same class with `part` before it, and `value` as its `attribute`."""
    kind: Any = type(type(optimizer).__name__, (part, type(optimizer)), {})
    made = kind.__new__(kind)
    # A scheduler may have put its own `step` into the optimizer, which is that of the plain one.
    made.__dict__.update({name: held for name, held in vars(optimizer).items() if name != "step"})
    setattr(made, attribute, value)
    return made
