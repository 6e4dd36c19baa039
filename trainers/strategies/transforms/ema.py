"""EMA: a moving average of the parameters. trainers.arrays.average has its arithmetic; a replica's state has it."""

from dataclasses import dataclass
from typing import Annotated

from trainers.arguments import FLAG, Flag, number
from trainers.arrays.average import Spans, keep
from trainers.options.average import Average, LocalSGD
from trainers.replica import Replica
from trainers.strategies.transforms.transform import Applied, Transform

DECAY = number("a number between 0 and 1, such as 0.999", lambda value: 0 < value < 1)


@dataclass(frozen=True)
class EMA(Transform):
    """Keeps an exponential moving average of the parameters (B. Polyak, A. Juditsky 1992), which often tests better.

    decay: after each step, average = decay * average + (1 - decay) * parameters. 0.999 averages about 1000 steps.
    validate: whether the validation uses the average; False: the parameters.

    The average begins with the parameters at the beginning of the fit, or continues that of an earlier fit; a fit
    without EMA drops it. It is saved with the model, and `evaluate` and `predict` use it. Running statistics of batch
    norm are those of the model.
    """

    decay: Annotated[
        float,
        DECAY,
        Flag(
            "ema",
            "X",
            "keep a moving average of the parameters with this decay, such as 0.999; it is tested, and saved with the "
            "model",
            default="none",
        ),
    ]
    validate: Annotated[bool, FLAG] = True

    def start(self, replica: Replica) -> Applied:
        return Averaging(replica, self.decay)

    def error(self, replica: Replica, average: Average | None) -> str:
        if not isinstance(average, LocalSGD):
            return ""
        return (
            f"EMA({self.decay}) with LocalSGD: between two averages the ranks have "
            "different parameters; leave out one of them"
        )

    @property
    def validates_average(self) -> bool:
        return self.validate


class Averaging(Applied):
    """Keeps the average of a replica's parameters, and moves it after each update."""

    def __init__(self, replica: Replica, decay: float) -> None:
        self._replica, self._decay = replica, decay

    def begin(self) -> None:
        keep(self._replica, self._decay)

    def updated(self, spans: Spans | None) -> None:
        if self._replica.average is not None:
            self._replica.average.move(spans)
