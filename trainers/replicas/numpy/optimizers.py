"""Optimizers on one flat buffer of parameters: in-place operations on cache-sized blocks, nothing allocated.

The formulas are those of torch.optim.SGD and torch.optim.Adam.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.errors import ArgumentError, ModelFileError

BLOCK = 32 * 1024  # elements that NumPy works on at a time: parameters, gradients, state and scratch fit the cache


class Optimizer(ABC):
    """Updates a flat buffer of parameters from one of gradients.

    lr: the learning rate.
    """

    default_lr: float
    slots: tuple[str, ...] = ()  # names of the state arrays, each as long as the parameters
    scratches = 1  # blocks of scratch memory that `_update` needs

    def __init__(self, lr: float | None = None) -> None:
        self.lr = _within("lr", self.default_lr if lr is None else lr, 0, math.inf)
        self.steps = 0
        self.state: dict[str, Any] = {}
        self._arrays: list[Any] = []
        self._cut: dict[tuple[int, int], list[Sequence[Any]]] = {}  # a part's blocks, cut when it is first updated

    def bind(self, xp: Any, parameters: Any, gradients: Any) -> None:
        """Work on these 1-D arrays of one length from now on; existing state is kept."""
        length = parameters.size
        for name in self.slots:
            if name not in self.state:
                self.state[name] = xp.zeros(length, parameters.dtype)
        self._xp = xp
        self._block = BLOCK if xp is np else max(length, 1)  # on a GPU every operation is a launch
        self._scratch = [xp.empty(min(self._block, length), parameters.dtype) for _ in range(self.scratches)]
        self._arrays = [parameters, gradients, *(self.state[name] for name in self.slots)]
        self._cut.clear()

    def step(self, part: slice | None = None) -> None:
        """One update, of the elements part.start to part.stop when given; the gradients are left as they are."""
        self.steps += 1
        start, stop = (0, self._arrays[0].size) if part is None else (part.start, part.stop)
        for block in self._blocks(start, stop):
            self._update(self._xp, *block)

    def _blocks(self, start: int, stop: int) -> list[Sequence[Any]]:
        """For each block of a part the arguments of `_update`."""
        if (start, stop) not in self._cut:
            spans = [slice(at, min(at + self._block, stop)) for at in range(start, stop, self._block)]
            self._cut[start, stop] = [
                [a[span] for a in self._arrays] + [s[: span.stop - span.start] for s in self._scratch] for span in spans
            ]
        return self._cut[start, stop]

    @abstractmethod
    def _update(self, xp: Any, parameters: Any, gradients: Any, *rest: Any) -> None:
        """Update one block; `rest` are its part of each slot, then scratch."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"lr": self.lr}

    def load(self, steps: int, state: dict[str, np.ndarray]) -> None:
        """Take on the number of steps and the slots of another optimizer of this kind. ModelFileError otherwise."""
        shapes = {name: array.shape for name, array in state.items()}
        expected = {name: array.shape for name, array in self.state.items()}
        if shapes != expected:
            kind = type(self).__name__
            raise ModelFileError(f"the optimizer state {shapes} does not fit {kind}, which needs {expected}")
        self.steps = steps
        for name, array in state.items():
            self.state[name][:] = self._xp.asarray(array)


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
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and low <= value < high) or (name == "lr" and value == 0):
        above = ">" if name == "lr" else ">="
        raise ArgumentError(f"{name} must be a number {above} {low} and < {high}, got {value!r}")
    return float(value)
