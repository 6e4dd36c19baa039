"""LearningRateSchedule: learning rates that follow the epochs, scaled to large batches, with a warm-up. StepSchedule:
rates that follow the steps.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017. If the batch is k times as large,
multiply the learning rate by k; reach it from the original rate in equal steps over the first five epochs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainers.arguments import POSITIVE, is_number
from trainers.errors import ArgumentError
from trainers.options.transforms import ENDING, SHAPES, Schedule
from trainers.replica import Replica
from trainers.watching.callback import Callback, Logs

WARM_UP = 5  # epochs


class LearningRateSchedule(Callback):
    """Sets the learning rate of the replicas. Given on all ranks or on none, since replicas must stay equal.

    schedule: schedule(epoch, rate) -> rate, as Keras' LearningRateScheduler takes it: called at the beginning of each
        epoch (0, 1, ...) with the current rate of the first parameter group; the other groups keep their ratio to it.
        None for a constant rate.
    scale: how many times larger the global batch is than the batch for which the rate was chosen; or "ranks": the rate
        was chosen for one rank's share of a batch, and scale is the number of ranks with which the fit begins.
    warmup_epochs: the epochs in which the rate rises, step by step, to that of the schedule: from rate / scale, or from
        0 when scale is 1. By default 5 when there is a scale, else 0.
    verbose: 1 to print the rate of each epoch on rank 0.

    After the fit the rates are as they were before it. A resumed fit continues with the rates of its checkpoint.
    Raises ArgumentError, in the fit on all ranks.
    """

    collective = True
    reads_batches = reads_model = False

    def __init__(
        self,
        schedule: Callable[[int, float], float] | None = None,
        *,
        scale: float | str = 1.0,
        warmup_epochs: float | None = None,
        verbose: int = 0,
    ) -> None:
        if schedule is not None and not callable(schedule):
            raise ArgumentError(f"schedule must be a function of epoch and learning rate, got {schedule!r}")
        if scale != "ranks" and not POSITIVE.holds(scale):
            raise ArgumentError(f'scale must be a number > 0, or "ranks", got {scale!r}')
        if warmup_epochs is not None and not (warmup_epochs == 0 or POSITIVE.holds(warmup_epochs)):
            raise ArgumentError(f"warmup_epochs must be a number >= 0, got {warmup_epochs!r}")
        self.schedule, self.scale, self.warmup_epochs, self.verbose = schedule, scale, warmup_epochs, verbose
        self._before: list[float] = []  # the rates of the groups before the fit
        self._last = 0.0  # the rate before this epoch, for an epoch that is repeated
        self._steps: int | None = 1

    def set_params(self, params: dict[str, Any]) -> None:
        self._steps = params["steps"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before = list(self.trainer.replica.learning_rates)
        self._scale_by(float(self.trainer.size if self.scale == "ranks" else self.scale))
        self._rate = self._last = self._before[0] * self._scale if self._before else 0.0

    def _scale_by(self, scale: float) -> None:
        self._scale, given = scale, self.warmup_epochs
        self._warm_up = (WARM_UP if scale > 1 else 0) if given is None else given

    def state(self) -> dict[str, Any]:
        return {"before": self._before, "rate": self._last, "scale": self._scale}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._before = state["before"].tolist()
        self._rate = self._last = float(state["rate"])
        if "scale" in state:  # the scale by the number of ranks at the beginning of the fit; older checkpoints lack it
            self._scale_by(float(state["scale"]))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._before or not self._before[0] > 0:
            kind = type(self.trainer.replica).__name__
            raise ArgumentError(f"the learning rates of this {kind} are {self._before}; a schedule needs one above 0")
        self._rate = self._scheduled(epoch)
        self._epoch = epoch
        self._set(self._rate_fraction(0))
        self._say(f"epoch {epoch + 1}: learning rate {self.trainer.replica.learning_rates[0]:g}")

    def _scheduled(self, epoch: int) -> float:
        rate = self._rate if self.schedule is None else self.schedule(epoch, self._rate)
        if not is_number(rate) or rate < 0:
            raise ArgumentError(f"schedule({epoch}, {self._rate:g}) must return a number >= 0, got {rate!r}")
        return float(rate)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._last = self._rate

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._epoch < self._warm_up:
            self._set(self._rate_fraction(batch))

    def _release(self) -> None:
        if self._before:
            self.trainer.replica.learning_rates = self._before
            self._before = []

    def _rate_fraction(self, batch: int) -> float:
        """Return the fraction of the scheduled rate for a step: less than 1 in the warm-up."""
        least = 1 / self._scale if self._scale > 1 else 0.0
        done = (batch + 1) / self._steps if self._steps else 0.0  # of a stream: the rate changes between epochs
        return least + (1 - least) * warm_up_fraction(self._epoch + done, self._warm_up)

    def _set(self, part: float) -> None:
        factor = part * self._rate / self._before[0]
        self.trainer.replica.learning_rates = [rate * factor for rate in self._before]


class StepSchedule(Callback):
    """Sets the learning rates of each step, as a Schedule says.

    All ranks get equal rates. After the fit the rates are as they were before it. A checkpoint has those.
    """

    reads_batches = reads_model = False

    def __init__(self, schedule: Schedule) -> None:
        self._rates, self._warm_up = schedule.rates, int(schedule.warmup)
        self._before: list[float] = []  # the rates before the fit
        self._steps: int | None = None  # of the training, without the warm-up

    def set_params(self, params: dict[str, Any]) -> None:
        planned, named = params["steps"], isinstance(self._rates, str)
        self._steps = None if planned is None else max(params["epochs"] * planned - self._warm_up, 1)
        if planned is None and named and self._rates in ENDING:
            raise ArgumentError(
                f'Schedule("{self._rates}") needs the number of steps in an epoch, which this loader does not tell: '
                "give the steps of the Loader, or a function of the step"
            )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before = list(self.trainer.replica.learning_rates)

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._before = state["before"].tolist()

    def _release(self) -> None:
        self.end(self.trainer.replica)
        self._before = []

    def end(self, replica: Replica) -> None:
        """Set the rates from before the fit. Local."""
        if self._before:
            replica.learning_rates = list(self._before)

    def set(self, replica: Replica, step: int) -> None:
        """Set the rates of step `step` of the training. Local."""
        if not self._before:
            return
        fraction = self.fraction(step)
        replica.learning_rates = [rate * fraction for rate in self._before]

    def fraction(self, step: int) -> float:
        """Return the fraction of the rates in a step. Raises ArgumentError."""
        if isinstance(self._rates, str):
            after = max(step - self._warm_up, 0)
            found: Any = SHAPES[self._rates](after if self._steps is None else min(after, self._steps), self._steps)
        else:
            found = self._rates(step)
            if not is_number(found) or found < 0:
                raise ArgumentError(f"Schedule: rates({step}) must return a number >= 0, got {found!r}")
        return float(found) * min((step + 1) / (self._warm_up + 1), 1.0)


def warm_up_fraction(done: float, epochs: float) -> float:
    """Return the finished fraction of a warm-up of `epochs` epochs, 0 to 1. done: finished epochs, fractional."""
    return min(done / epochs, 1.0) if epochs else 1.0
