"""Schedule: the learning rates of each step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from trainers.arguments import Check, Flag, integer, is_number
from trainers.errors import ArgumentError
from trainers.options.average import Average
from trainers.replica import Replica
from trainers.strategies.transforms.transform import Applied, Transform
from trainers.watching.callback import Callback, Logs

Shape = Callable[[int, int | None], float]
# the fraction of the rate in a step after the warm-up, of `total` such steps
SHAPES: dict[str, Shape] = {
    "constant": lambda step, total: 1.0,
    "linear": lambda step, total: 1 - step / total if total else 1.0,
    "cosine": lambda step, total: (1 + math.cos(math.pi * step / total)) / 2 if total else 1.0,
    "inverse_sqrt": lambda step, total: (step + 1) ** -0.5,
}
ENDING = ("linear", "cosine")  # these need the number of steps
RATES = Check(
    f"{', '.join(SHAPES)}, or a function of the step",
    lambda value: callable(value) or (isinstance(value, str) and value in SHAPES),
)


@dataclass(frozen=True)
class Schedule(Transform):
    """Sets the learning rates of each step: those from before the fit, times a fraction that depends on the step alone.

    rates: "constant", "linear" or "cosine" (I. Loshchilov, F. Hutter: SGDR, 2017), which end at 0 with the training;
        "inverse_sqrt" (A. Vaswani et al.: Attention is all you need, 2017); or a function of the step (0, 1, ... from
        the beginning of the training) that returns the fraction.
    warmup: the number of steps at the beginning in which the rates rise linearly. In step s the fraction is multiplied
        by (s + 1) / (warmup + 1). A named schedule begins after them.

    After the fit the rates are as before it. `epochs` decides when "linear" and "cosine" end, so give the same to a
    resumed fit.
    """

    rates: Annotated[
        str | Callable[[int], float],
        RATES,
        Flag(
            "schedule",
            "",
            "the learning rates of the steps: linear and cosine end at 0",
            default="constant",
            choices=tuple(SHAPES),
        ),
    ] = "constant"
    warmup: Annotated[
        int, integer(0), Flag("warmup_steps", "N", "in the first N steps the learning rates rise linearly")
    ] = 0

    def __repr__(self) -> str:
        """The same text on all ranks, which compare it; that of a function has an address."""
        rates = self.rates
        name = repr(rates) if isinstance(rates, str) else getattr(rates, "__qualname__", type(rates).__name__)
        return f"Schedule({name}, warmup={self.warmup})"

    def start(self, replica: Replica) -> Applied:
        return StepSchedule(self, replica)

    def error(self, replica: Replica, average: Average | None) -> str:
        rates = replica.learning_rates
        if any(rate > 0 for rate in rates):
            return ""
        return f"the learning rates of this replica are {rates}; a Schedule needs one above 0 that can be set"


class StepSchedule(Callback, Applied):
    """Sets the learning rates of each step, as a Schedule says. All ranks get equal rates. After the fit these are as
    they were before it. A checkpoint has those from before the fit."""

    reads_batches = reads_model = False
    _before: Sequence[float] = ()

    def __init__(self, schedule: Schedule, replica: Replica) -> None:
        self._rates, self._warm_up, self._replica = schedule.rates, int(schedule.warmup), replica
        self._steps: int | None = None  # of the training, without the warm-up
        self.watchers = [self]

    def plan(self, epochs: int, length: int | None) -> None:
        named = isinstance(self._rates, str)
        self._steps = None if length is None else max(epochs * length - self._warm_up, 1)
        if length is None and named and self._rates in ENDING:
            raise ArgumentError(
                f'Schedule("{self._rates}") needs the number of steps in an epoch, which this loader does not tell: '
                "give the steps of the Loader, or a function of the step"
            )

    def begin_step(self, number: int) -> None:
        if self._before:
            fraction = self.fraction(number)
            self._replica.learning_rates = [rate * fraction for rate in self._before]

    def end_step(self) -> None:
        """As Applied.end_step: set the rates from before the fit, until the next `begin_step`."""
        if self._before:
            self._replica.learning_rates = list(self._before)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before = list(self._replica.learning_rates)

    def state(self) -> dict[str, Any]:
        return {"before": self._before}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._before = state["before"].tolist()

    def _release(self) -> None:
        self.end_step()
        self._before = ()

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
