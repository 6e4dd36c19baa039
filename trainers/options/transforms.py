"""Transforms of a step: `fit(transforms=[ClipNorm(1.0), EMA(0.999)])`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from trainers.arguments import FLAG, POSITIVE, Check, Checked, Flag, integer, number
from trainers.errors import ArgumentError


@dataclass(frozen=True)
class Accumulate(Checked):
    """Computes each rank's share of a batch in micro-batches, one after the other, and adds up their gradients.

    micro_batches: their number. Memory for activations is that of one micro-batch; the training is the same.

    `batch_size` remains the GLOBAL batch of an update: Lightning's accumulate_grad_batches=k makes the batch k times as
    large instead.
    """

    micro_batches: Annotated[
        int,
        integer(1),
        Flag(
            "accumulate",
            "N",
            "each rank computes its share of a batch in N micro-batches one after the other, for less memory; a batch "
            "stays --batch-size samples",
            default="1",
        ),
    ]


@dataclass(frozen=True)
class ClipNorm(Checked):
    """Clips the averaged gradients (R. Pascanu et al.: On the difficulty of training recurrent neural networks, 2013).

    norm: the largest 2-norm of the gradients of all parameters together, as PyTorch's `clip_grad_norm_` takes it.
        Larger gradients are scaled down to it, on all ranks by the same factor.

    The history has the mean norm before the clipping, "grad_norm". Asynchronous servers and LocalSGD average no
    gradients: there each worker clips those of its own rows.
    """

    norm: Annotated[
        float,
        POSITIVE,
        Flag("clip_norm", "X", "scale the averaged gradients down to this norm, if theirs is larger", default="none"),
    ]


DECAY = number("a number between 0 and 1, such as 0.999", lambda value: 0 < value < 1)


@dataclass(frozen=True)
class EMA(Checked):
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


@dataclass(frozen=True)
class SkipNotFinite(Checked):
    """Leaves out a step on all ranks if any rank's gradients are NaN or infinite, with a warning that names the rank.

    Nothing is updated then, and batch norm's statistics are as before the batch. With LocalSGD, asynchronous servers
    and spare replicas the rank leaves out its own rows alone. Costs a message of 16 bytes and one reading of the
    gradients in each step. `trainers.callbacks.CheckGradients` raises an error instead.
    """


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
class Schedule(Checked):
    """Sets the learning rates of each step: those from before the fit, times a fraction that depends on the step alone.

    rates: "constant", "linear" or "cosine" (I. Loshchilov, F. Hutter: SGDR, 2017), which end at 0 with the training;
        "inverse_sqrt" (A. Vaswani et al.: Attention is all you need, 2017); or a function of the step (0, 1, ... from
        the beginning of the training) that returns the fraction.
    warmup: the number of steps at the beginning in which the rates rise linearly. In step s the fraction is multiplied
        by (s + 1) / (warmup + 1). A named schedule begins after them.

    After the fit the rates are as before it. `epochs` decides when "linear" and "cosine" end, so give the same to a
    resumed fit. `trainers.callbacks.LearningRateSchedule` sets rates by epoch.
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


Transform = Accumulate | ClipNorm | EMA | SkipNotFinite | Schedule
TRANSFORMS: tuple[type, ...] = Transform.__args__


def chosen(transforms: Any) -> dict[type, Any]:
    """Return the transforms of a step by their classes. Raises ArgumentError unless each is a transform, given once."""
    names = ", ".join(each.__name__ for each in TRANSFORMS)
    found: dict[type, Any] = {}
    if not isinstance(transforms, Iterable):
        raise ArgumentError(f"transforms must be a list of {names}, got {transforms!r}")
    for each in transforms:
        if not isinstance(each, Transform):
            new = " is a class; make an object of one of" if isinstance(each, type) else " is no transform; use"
            raise ArgumentError(f"transforms: {getattr(each, '__name__', repr(each))}{new} {names}")
        if type(each) in found:
            raise ArgumentError(f"transforms has two {type(each).__name__}; give one")
        found[type(each)] = each
    return found
