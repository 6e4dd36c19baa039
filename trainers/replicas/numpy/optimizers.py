"""Optimizers on one flat buffer of parameters: in-place operations on cache-sized blocks, without allocations.

The formulas are those of torch.optim.SGD and torch.optim.Adam.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from trainers.arguments import is_number
from trainers.arrays.average import on_host
from trainers.errors import ArgumentError
from trainers.replica import Slices, single
from trainers.replicas.flat import FlatOptimizer, Layout

PREFIX = "optimizer."  # of the names of its state in a model file
STEPS = f"{PREFIX}steps"
BLOCK = 32 * 1024  # elements per block, so that its parameters, gradients, state and scratch fit the cache


class Optimizer(FlatOptimizer):
    """Updates a flat buffer of parameters, or a slice of it, from a buffer of gradients.

    lr: the learning rate. state: the arrays of `slots` by name, as long as the parameters or the slice.
    """

    default_lr: float
    slots: tuple[str, ...] = ()  # names of the state arrays, with one number for each parameter
    scratches = 1  # blocks of scratch memory that `_update` needs

    def __init__(self, lr: float | None = None) -> None:
        self.lr = _within("lr", self.default_lr if lr is None else lr, 0, math.inf)
        self.steps = 0
        self.state: dict[str, Any] = {}

    def bind(self, xp: Any, parameters: Any, gradients: Any) -> None:
        """Set the arrays to work on, 1-D and of one length. Existing state is kept."""
        elementwise = [f"{PREFIX}{name}" for name in self.slots]
        super().__init__(Layout([parameters.shape]), [*elementwise, STEPS], elementwise)
        self._xp, self._parameters, self._gradients = xp, parameters, gradients
        self.state = self.state or {name: xp.zeros(parameters.size, parameters.dtype) for name in self.slots}
        self._cut_blocks()

    def step(self, part: Slices | None = None) -> None:
        """Update all parameters, or those of the slice `part`. Does not change the gradients."""
        if part is None:
            self.extend()
        else:
            self.restrict(part)
        self.steps += 1
        for block in self._blocks:
            self._update(self._xp, *block)

    def _cut_blocks(self) -> None:
        """Set `_blocks`: the arguments of `_update` for each block of the updated parameters."""
        part = single(self.part or slice(0, self._parameters.size))
        length, dtype = part.stop - part.start, self._parameters.dtype
        # on a GPU one block, because every operation is a kernel launch
        size = BLOCK if self._xp is np else max(length, 1)
        scratch = [self._xp.empty(min(size, length), dtype) for _ in range(self.scratches)]
        arrays = [self._parameters[part], self._gradients[part], *(self.state[name] for name in self.slots)]
        spans = [slice(at, min(at + size, length)) for at in range(0, length, size)]
        self._blocks = [
            [each[span] for each in arrays] + [each[: span.stop - span.start] for each in scratch] for span in spans
        ]

    @abstractmethod
    def _update(self, xp: Any, parameters: Any, gradients: Any, *rest: Any) -> None:
        """Update one block. rest: the block's part of each slot, then its scratch memory."""

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"lr": self.lr}

    # Methods of FlatOptimizer

    def slice_error(self) -> str:
        return ""

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        held = {f"{PREFIX}{name}": self.state[name] for name in self.slots} | {STEPS: np.array(self.steps)}
        return {name: [array] for name, array in held.items() if name in names}

    on_host = staticmethod(on_host)

    def write(self, part: Slices | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        self.part, self.steps = part, int(entries[STEPS][0])
        dtype = self._parameters.dtype
        self.state = {name: self._xp.array(entries[f"{PREFIX}{name}"][0], dtype) for name in self.slots}
        self._cut_blocks()

    @property
    def learning_rates(self) -> list[float]:
        return [self.lr]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        (self.lr,) = rates


class SGD(Optimizer):
    """p -= lr * g"""

    default_lr = 0.1

    def _update(self, xp: Any, parameters: Any, gradients: Any, *rest: Any) -> None:
        (scratch,) = rest
        xp.multiply(gradients, self.lr, out=scratch)
        parameters -= scratch


class Momentum(Optimizer):
    """v = momentum * v + g; p -= lr * v"""

    default_lr = 0.05
    slots = ("velocity",)

    def __init__(self, lr: float | None = None, momentum: float = 0.9) -> None:
        super().__init__(lr)
        self.momentum = _within("momentum", momentum, 0, 1)

    def config(self) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum}

    def _update(self, xp: Any, parameters: Any, gradients: Any, *rest: Any) -> None:
        velocity, scratch = rest
        velocity *= self.momentum
        velocity += gradients
        xp.multiply(velocity, self.lr, out=scratch)
        parameters -= scratch


class Adam(Optimizer):
    """D. Kingma, J. Ba: Adam: a method for stochastic optimization, 2015.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + epsilon)
    """

    default_lr = 0.001
    slots = ("first_moment", "second_moment")
    scratches = 2

    def __init__(
        self, lr: float | None = None, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        super().__init__(lr)
        self.beta1, self.beta2 = _within("beta1", beta1, 0, 1), _within("beta2", beta2, 0, 1)
        self.epsilon = _within("epsilon", epsilon, 0, math.inf)

    def config(self) -> dict[str, Any]:
        return {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}

    def _update(self, xp: Any, parameters: Any, gradients: Any, *rest: Any) -> None:
        first, second, change, root = rest
        first *= self.beta1
        xp.multiply(gradients, 1 - self.beta1, out=change)
        first += change
        second *= self.beta2
        xp.multiply(gradients, gradients, out=change)
        change *= 1 - self.beta2
        second += change
        xp.multiply(second, 1 / (1 - self.beta2**self.steps), out=root)
        xp.sqrt(root, out=root)
        root += self.epsilon
        xp.divide(first, root, out=change)
        change *= self.lr / (1 - self.beta1**self.steps)
        parameters -= change


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam}


def _within(name: str, value: float, low: float, high: float) -> float:
    if not (is_number(value) and low <= value < high) or (name == "lr" and value == 0):
        above = ">" if name == "lr" else ">="
        raise ArgumentError(f"{name} must be a number {above} {low} and < {high}, got {value!r}")
    return float(value)
