"""Models and data for the tests of MirroredOptimizer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from trainers.pytorch import MirroredOptimizer

SIZE = MPI.COMM_WORLD.size
ROWS = 60  # divisible by 1 to 5 ranks
SMALL_BUCKETS = {"first_mb": 0.001, "mb": 0.004}

several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
both_updates = pytest.mark.parametrize("update", ["replicated", "sharded"])
both_overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["after", "during"])

torch.set_num_threads(1)


def network(seed: int = 0, features: int = 12) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 40), nn.Tanh(), nn.Linear(40, 17), nn.Tanh(), nn.Linear(17, 3))


def data(steps: int = 5, features: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all ranks: inputs of shape (steps, ROWS, features), and class numbers of shape (steps,
    ROWS)."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, ROWS, features, generator=generator)
    return x, torch.randint(0, 3, (steps, ROWS), generator=generator)


def mine(rows: torch.Tensor) -> torch.Tensor:
    part = ROWS // SIZE
    return rows[MPI.COMM_WORLD.rank * part :][:part]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[[torch.Tensor], torch.Tensor],
    steps: int = 5,
    features: int = 12,
) -> None:
    for x, y in zip(*data(steps, features), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(take(x)), take(y)).backward()
        optimizer.step()


def everything(rows: torch.Tensor) -> torch.Tensor:
    return rows


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, here), there in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (here.float() - there.float()).abs().max().item()
        torch.testing.assert_close(here.data, there.data, rtol=tolerance, atol=tolerance, msg=f"{name} by {difference}")


def assert_mirrored(world: MPI.Intracomm, model: nn.Module) -> None:
    bits = b"".join(each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for each in model.parameters())
    assert len(set(world.allgather(bits))) == 1, "the ranks' parameters differ"


mirrored = MirroredOptimizer
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


EDITS: dict[str, Callable[[Any], object]] = {  # ways to change the gradient of a parameter
    "assign": lambda parameter: setattr(parameter, "grad", parameter.grad / 4),
    "assign_data": lambda parameter: setattr(parameter.grad, "data", parameter.grad.data / 4),
    "scale": lambda parameter: parameter.grad.mul_(0.25),
    "scale_data": lambda parameter: parameter.grad.data.mul_(0.25),
    "scale_array": lambda parameter: np.multiply(array := parameter.grad.numpy(), 0.25, out=array),
    "gaps": lambda parameter: setattr(parameter, "grad", torch.stack([parameter.grad] * 2, -1)[..., 0]),
    "give": lambda parameter: setattr(parameter, "grad", torch.ones_like(parameter) / 8),
    "give_data": lambda parameter: setattr(parameter.grad, "data", torch.ones_like(parameter) / 8),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["momentum"](model.parameters())


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](model.parameters())


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class Clipped(torch.optim.SGD):
    """An optimizer that needs the gradients of all parameters."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.1)
        super().step()
