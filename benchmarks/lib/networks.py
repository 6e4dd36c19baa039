"""PyTorch networks that several benchmarks train, and a step of their training. Needs PyTorch."""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def one_thread() -> None:
    """Let this rank compute with one thread, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def perceptron(sizes: Sequence[int]) -> nn.Module:
    """Dense layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional(channels: Sequence[int], classes: int = 10) -> nn.Module:
    """3x3 convolutions with ReLU, each but the first on half as many pixels, the mean of the pixels, a dense layer."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2 if number else 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))


class Trained(NamedTuple):
    """A network in training."""

    module: nn.Module  # computes the forward pass
    optimizer: Any
    close: Callable[[], object] = bool

    def step(self, x: Tensor, y: Tensor) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()
