"""LearningRateSchedule: learning rates that follow the epochs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainers.arguments import is_number
from trainers.errors import ArgumentError
from trainers.replica import Replica
from trainers.watching.callback import Callback, Logs


class RatesOfFit(Callback):
    """Base of callbacks that set learning rates: after the fit these are as they were before it. A checkpoint has those
    from before the fit."""

    reads_batches = reads_model = False
    _before: Sequence[float] = ()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before = list(self.trainer.replica.learning_rates)

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._before = state["before"].tolist()

    def _release(self) -> None:
        self.end(self.trainer.replica)
        self._before = ()

    def end(self, replica: Replica) -> None:
        """Set the rates from before the fit. Local."""
        if self._before:
            replica.learning_rates = list(self._before)


class LearningRateSchedule(RatesOfFit):
    """Sets the learning rate by epoch. Given on all ranks or on none, since replicas must stay equal.

    schedule: schedule(epoch, rate) -> rate, as Keras' LearningRateScheduler takes it: called at the beginning of each
        epoch (0, 1, ...) with the current rate of the first parameter group; the other groups keep their ratio to it.
    verbose: 1 to print the rate of each epoch on rank 0.

    After the fit the rates are as they were before it. A resumed fit continues with the rates of its checkpoint.
    `transforms=[Schedule(...)]` sets the rates by step, with a warm-up. Raises ArgumentError, in the fit on all ranks.
    """

    collective = True

    def __init__(self, schedule: Callable[[int, float], float], verbose: int = 0) -> None:
        if not callable(schedule):
            raise ArgumentError(f"schedule must be a function of epoch and learning rate, got {schedule!r}")
        self.schedule, self.verbose = schedule, verbose
        self._last = 0.0  # the rate before this epoch, for an epoch that is repeated

    def on_train_begin(self, logs: Logs | None = None) -> None:
        super().on_train_begin(logs)
        self._rate = self._last = self._before[0] if self._before else 0.0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rate": self._last}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(state)
        self._rate = self._last = float(state["rate"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._before or not self._before[0] > 0:
            kind = type(self.trainer.replica).__name__
            raise ArgumentError(
                f"the learning rates of this {kind} are {list(self._before)}; a schedule needs one above 0"
            )
        rate = self.schedule(epoch, self._rate)
        if not is_number(rate) or rate < 0:
            raise ArgumentError(f"schedule({epoch}, {self._rate:g}) must return a number >= 0, got {rate!r}")
        self._rate = float(rate)
        factor = self._rate / self._before[0]
        self.trainer.replica.learning_rates = [rate * factor for rate in self._before]
        self._say(f"epoch {epoch + 1}: learning rate {self.trainer.replica.learning_rates[0]:g}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._last = self._rate
