"""What the network's arguments mean, and what is wrong with them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.errors import ArgumentError
from trainers.replicas.numpy.optimizers import OPTIMIZERS, Optimizer


def checked_sizes(sizes: Sequence[int]) -> list[int]:
    checked = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else []
    if len(checked) < 2 or not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1 for size in checked
    ):
        raise ArgumentError(f"sizes={sizes!r} describes no network: give features, hidden layers and outputs, >= 1")
    return [int(size) for size in checked]


def length_of(sizes: Sequence[int]) -> int:
    """The number of parameters: weights and biases of each layer."""
    return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))


def choose(what: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise ArgumentError(f"{what}={name!r} is unknown; use one of {', '.join(table)}")
    return table[name]


def make_optimizer(optimizer: str | Optimizer, lr: float | None) -> Optimizer:
    if isinstance(optimizer, str):
        return choose("optimizer", optimizer, OPTIMIZERS)(lr)
    if not isinstance(optimizer, Optimizer):
        found = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise ArgumentError(
            f"optimizer: give {', '.join(OPTIMIZERS)}, or an optimizer of trainers.replicas.numpy.optimizers, not "
            f"{found.__module__}.{found.__qualname__}"
        )
    if lr is not None:
        raise ArgumentError(
            f"lr={lr} belongs to an optimizer's name; {type(optimizer).__name__} has its own, {optimizer.lr}"
        )
    return optimizer


def array_module(device: str) -> Any:
    if device == "cpu":
        return np
    if device != "cuda":
        raise ArgumentError(f'device={device!r} is unknown; use "cpu" or "cuda"')
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError(
            f'device="cuda" needs CuPy ({error}); pip install ".[cuda12]" or ".[cuda13]" in the checkout'
        ) from error
    return cupy
