"""Losses of the NumPy/CuPy network. They work in place on the last layer's output z, (rows, outputs) float32."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from trainers.errors import ArgumentError


class Loss(ABC):
    """A loss on one array module, `xp`. One step calls `targets`, `measure` and `derive`, in this order."""

    metrics: tuple[str, ...] = ("loss",)
    probabilities = False  # whether `predict` gives the probabilities of classes

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    @abstractmethod
    def check(self, y: np.ndarray, outputs: int) -> None:
        """Raise ArgumentError if y can't be the target of a network with so many outputs."""

    @abstractmethod
    def targets(self, y: np.ndarray) -> Any:
        """Return y in the form that `measure` and `derive` take, on the network's device."""

    def predict(self, z: Any) -> None:
        """Turn z into the prediction."""
        return

    @abstractmethod
    def measure(self, z: Any, y: Any, values: Any, weights: Any = None) -> None:
        """Write the sums over the rows of `metrics` into `values`. Overwrites z with the input of `derive`.

        weights: (rows,), by which the loss of each row is multiplied; None for 1.
        """

    @abstractmethod
    def derive(self, z: Any, y: Any, factor: Any) -> None:
        """Turn z, as `measure` left it, into `factor` times the derivative by z of the loss summed over the rows.

        factor: a number; or (rows, 1), one for each row.
        """


class SoftmaxCrossEntropy(Loss):
    """y holds class numbers, (rows,) integers from 0 to outputs - 1; predictions are probabilities."""

    metrics = ("loss", "accuracy")
    probabilities = True

    def __init__(self, xp: Any) -> None:
        super().__init__(xp)
        self._rows = xp.arange(0)

    def check(self, y: np.ndarray, outputs: int) -> None:
        if y.ndim != 1 or y.dtype.kind not in "iu":
            raise ArgumentError(
                f"labels must be class numbers, a 1-D array of integers, not {y.dtype} of shape {y.shape}; "
                "for one-hot labels pass y.argmax(axis=1)"
            )
        if y.size and not (y.min() >= 0 and y.max() < outputs):
            raise ArgumentError(
                f"labels run from {y.min()} to {y.max()}, and the network has {outputs} outputs: expected 0 to "
                f"{outputs - 1}"
            )

    def targets(self, y: np.ndarray) -> Any:
        if len(y) > len(self._rows):
            self._rows = self._xp.arange(len(y))
        return self._xp.asarray(y)

    def predict(self, z: Any) -> None:
        z -= z.max(axis=1, keepdims=True)  # the largest exponent is 0, so nothing overflows
        z /= self._exponentials(z)

    def measure(self, z: Any, y: Any, values: Any, weights: Any = None) -> None:
        values[1] = (z.argmax(axis=1) == y).sum()
        z -= z.max(axis=1, keepdims=True)
        right = z[self._rows[: len(y)], y]
        total = self._exponentials(z)
        losses = self._xp.log(total[:, 0]) - right
        values[0] = losses.sum() if weights is None else losses.dot(weights)
        z /= total

    def derive(self, z: Any, y: Any, factor: Any) -> None:
        z[self._rows[: len(y)], y] -= 1  # probabilities minus one-hot labels
        z *= factor

    def _exponentials(self, z: Any) -> Any:
        self._xp.exp(z, out=z)
        return z.sum(axis=1, keepdims=True)


class MeanSquaredError(Loss):
    """y holds numbers, (rows, outputs), or (rows,) with one output; the mean is over rows and outputs."""

    def check(self, y: np.ndarray, outputs: int) -> None:
        if y.dtype.kind not in "iuf" or y.shape[1:] not in {(outputs,), () if outputs == 1 else (outputs,)}:
            raise ArgumentError(
                f"targets must be numbers of shape ({len(y)}, {outputs}), not {y.dtype} of shape {y.shape}"
            )

    def targets(self, y: np.ndarray) -> Any:
        return self._xp.asarray(y, dtype=np.float32).reshape(len(y), -1)

    def measure(self, z: Any, y: Any, values: Any, weights: Any = None) -> None:
        z -= y
        flat = z.reshape(-1)
        values[0] = (flat.dot(flat) if weights is None else (z * z).sum(axis=1).dot(weights)) / z.shape[1]

    def derive(self, z: Any, y: Any, factor: Any) -> None:
        z *= factor * 2 / z.shape[1]


LOSSES: dict[str, type[Loss]] = {
    "softmax_cross_entropy": SoftmaxCrossEntropy,
    "mean_squared_error": MeanSquaredError,
}
