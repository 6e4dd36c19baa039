"""A step of an optimizer: gradients averaged, parameters updated, replicas compared now and then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from trainers.pytorch.averaging import Averager
from trainers.pytorch.checks import Options
from trainers.pytorch.closures import mean_loss
from trainers.pytorch.comparing import compare_replicas
from trainers.pytorch.kernels import Kernels
from trainers.pytorch.sharded import ShardedOptimizer


class Stepper:
    """The steps of one MirroredOptimizer; see there. All methods are collective.

    optimizer: the plain one. kernels: of this one. trained: its parameters by name. sharded: what updates slices; None
        where every rank updates everything.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        averager: Averager,
        kernels: Kernels,
        sharded: ShardedOptimizer | None,
        trained: dict[str, Parameter],
        options: Options,
    ) -> None:
        self._optimizer, self._averager, self._sharded, self._trained = optimizer, averager, sharded, trained
        self._kernels = kernels
        self._every = options.check_every
        self._answer = options.on_divergence, options.source
        self.skipped = 0  # steps that all ranks have left out

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Average, update, and count; returns what a closure's losses are on average."""
        averager, sharded = self._averager, self._sharded
        averager.in_closure = closure is not None
        try:
            loss = self._replicated(closure) if sharded is None else self._slices(sharded, closure)
        finally:
            averager.in_closure = False
        self.stepped()
        return loss

    def _replicated(self, closure: Callable[[], Any] | None) -> Any:
        averager = self._averager
        self._kernels.replace_broken()
        if closure is not None:
            return self._optimizer.step(partial(mean_loss, averager, closure))
        averager.average()
        return None if averager.leaves_out() else averager.clock.update(self._optimizer.step)

    def _slices(self, sharded: ShardedOptimizer, closure: Callable[[], Any] | None) -> Any:
        averager, loss = self._averager, None
        if closure is not None:
            with torch.enable_grad():
                loss = mean_loss(averager, closure)
        averager.average()
        if not averager.leaves_out():
            averager.clock.update(sharded.update)
        return loss

    def stepped(self) -> None:
        """What a step ends with."""
        averager = self._averager
        self.skipped += averager.leaves_out()
        if averager.check is not None and averager.check.forwards is not None:
            averager.check.forwards.stepped(averager.leaves_out())
        if averager.leaves_out() and self._sharded is not None and self._sharded.twins is not None:
            self._sharded.twins.left_out()
        behind = self._some_are_behind()
        averager.stepped(release=self._sharded is not None)
        if self._every and averager.steps % self._every == 0 and not behind:
            compare = partial(
                compare_replicas, averager.comm, self._optimizer, self._trained, self._sharded, *self._answer
            )
            averager.together("compares the replicas", compare)

    def _some_are_behind(self) -> bool:
        """Whether ranks have run out of batches in join(): those get the parameters when it ends, so they differ now.

        Local, after the averages of a step; the same on all ranks.
        """
        averager = self._averager
        counted = averager.rows if averager.joining and self._sharded is None else None
        return counted is not None and counted.ranks() < averager.comm.size
