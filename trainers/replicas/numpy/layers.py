"""Activations and initialisation of dense layers, for NumPy and CuPy through the array module `xp`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Activation(NamedTuple):
    """apply: overwrites z with the activation. derive: overwrites activations with the derivative there."""

    apply: Callable[[Any, Any], None]
    derive: Callable[[Any, Any], None]
    init: str  # the initialisation that suits it


def _relu(xp: Any, z: Any) -> None:
    xp.maximum(z, 0, out=z)


def _relu_derivative(xp: Any, a: Any) -> None:
    xp.sign(a, out=a)  # activations are never negative, so this is 0 or 1


def _tanh(xp: Any, z: Any) -> None:
    xp.tanh(z, out=z)


def _tanh_derivative(xp: Any, a: Any) -> None:
    xp.multiply(a, a, out=a)
    xp.subtract(1, a, out=a)


ACTIVATIONS = {
    "relu": Activation(_relu, _relu_derivative, "he"),
    "tanh": Activation(_tanh, _tanh_derivative, "glorot"),
}


def he(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Normal with variance 2 / fan_in. K. He et al.: Delving deep into rectifiers, 2015."""
    return random.normal(0.0, np.sqrt(2.0 / rows), (rows, columns))


def glorot(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Uniform with variance 2 / (fan_in + fan_out). X. Glorot, Y. Bengio: Understanding the difficulty of
    training deep feedforward neural networks, 2010."""
    limit = np.sqrt(6.0 / (rows + columns))
    return random.uniform(-limit, limit, (rows, columns))


INITIALISATIONS = {"he": he, "glorot": glorot}
