"""DistributedOptimizer(op=hvd.Adasum): every rank makes its own step, and what the steps have changed is combined."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainers.horovod import session
from trainers.horovod.arguments import reduces
from trainers.horovod.averaging import names_of
from trainers.horovod.compression import Compressor
from trainers.horovod.errors import OrderError
from trainers.horovod.handles import synchronize
from trainers.horovod.operations import Adasum, grouped_allreduce_async_
from trainers.horovod.process_sets import ProcessSet


class Deltas:
    """The changes that one optimizer's step has made to its parameters, combined by Adasum, each by itself."""

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: "Iterable[tuple[str, torch.Tensor]] | None",
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        self.names = names_of(param_groups, named_parameters)
        self.passes = passes
        self._compression, self._process_set = compression, process_set
        self._active = bool(process_set.included()) and session.size() > 1
        reduces("DistributedOptimizer", Adasum, _learning(param_groups))

    def step(self, param_groups: list[dict[str, Any]], step: Callable[[], Any]) -> Any:
        """Have `step` change the parameters, and change them by what Adasum makes of all ranks' changes. Collective."""
        learning = _learning(param_groups)
        if not self._active or not learning:
            return step()
        before = [parameter.detach().clone() for parameter in learning]
        returned = step()
        with torch.no_grad():
            changes = [parameter - old for parameter, old in zip(learning, before, strict=True)]
            for parameter, old, change in zip(learning, before, self._combined(changes, learning), strict=True):
                parameter.copy_(old + change)
        return returned

    def _combined(self, changes: list[torch.Tensor], learning: list[torch.Tensor]) -> list[torch.Tensor]:
        short, contexts = zip(*map(self._compression.compress, changes), strict=True)
        name = f"adasum.{self.names.get(learning[0], 'added')}"
        handle = grouped_allreduce_async_(short, None, name, Adasum, process_set=self._process_set)
        return [
            self._compression.decompress(change, context)
            for change, context in zip(synchronize(handle), contexts, strict=True)
        ]


def _learning(param_groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in param_groups for parameter in group["params"] if parameter.requires_grad]


class DistributedAdasum(torch.optim.Optimizer):
    """The part that DistributedOptimizer(op=hvd.Adasum) adds to an optimizer's class.

    Gradients and the optimizer's state (momentum and the like) stay each rank's own.
    """

    _deltas: Deltas

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._deltas.names

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes add up to the gradient of a step."""
        return self._deltas.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change it, between steps."""
        self._deltas.passes = passes

    def synchronize(self) -> None:
        """Nothing: gradients are this rank's own."""

    def skip_synchronize(self) -> Any:
        """An OrderError, as in Horovod."""
        raise OrderError("with op=hvd.Adasum optimizer.step() itself communicates: there is nothing to skip")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, and combine that with all ranks' updates. Collective. closure: computes this rank's gradients."""
        return self._deltas.step(self.param_groups, lambda: super(DistributedAdasum, self).step(closure))
