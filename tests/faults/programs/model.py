"""The model and the data of a run."""

import functools
from typing import Any

import numpy as np

from tests.faults.notes import Notes
from tests.faults.plans import LOSSES, ROWS, Plan
from trainers import datasets
from trainers.replica import Replica
from trainers.replicas.numpy.network import NumpyNetwork

SIZES = (64, 32, 10)
RATES = {"momentum": 0.02, "adam": 0.002}
TESTED = 200  # rows


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x and y for training, x and y for testing: some of the digits, scaled."""
    data = datasets.load("digits")
    x_train, x_test = (((x - data.shift) * data.scale).astype(np.float32) for x in (data.x_train, data.x_test))
    return x_train[:ROWS], data.y_train[:ROWS], x_test[:TESTED], data.y_test[:TESTED]


def replica(plan: Plan) -> Replica:
    """This rank's copy of the model, with its optimizer."""
    rate = RATES[plan.optimizer]
    return NumpyNetwork(SIZES, activation="tanh", optimizer=plan.optimizer, lr=rate, seed=1)


def trains_alone(plan: Plan, notes: Notes, left: list[int]) -> bool:
    """Return whether this rank, of those that are left, is to train once more alone, for a comparison. It dies at no
    point."""
    faulty = {fault.rank for fault in plan.faults if fault.kind in LOSSES}
    return notes.rank == min(set(left) - faulty, default=None)


def torch_module() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    module[2].weight.register_hook(lambda _: backward())
    return module


def backward() -> None:
    """Called when backward is halfway; a named point."""


def buckets(plan: Plan) -> Any:
    """Return how the gradients of a PyTorch model are reduced: in several buckets, during backward or after it."""
    from trainers.pytorch import Buckets

    return Buckets(plan.number % 2 == 1, first_mb=0.001, mb=0.002)


def torch_optimizer(plan: Plan, module: Any) -> Any:
    import torch

    if plan.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=RATES["adam"])
    return torch.optim.SGD(module.parameters(), lr=RATES["momentum"], momentum=0.9)
