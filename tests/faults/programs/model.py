"""The model and the data of a run, and its result on one rank without faults."""

import functools
import threading
from typing import Any

import numpy as np

from tests.faults.plans import BATCH, EPOCHS, ROWS, Plan
from trainers import datasets
from trainers.data import Arrays, Batches
from trainers.replica import Replica
from trainers.replicas.numpy.network import NumpyNetwork

SIZES = (64, 32, 10)
RATES = {"momentum": 0.02, "adam": 0.002}
TESTED = 200  # rows
ONE_AT_A_TIME = threading.Lock()  # PyTorch has one seed for all threads


@functools.cache
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x and y for training, x and y for testing: some of the digits, scaled."""
    data = datasets.load("digits")
    x_train, x_test = (((x - data.shift) * data.scale).astype(np.float32) for x in (data.x_train, data.x_test))
    return x_train[:ROWS], data.y_train[:ROWS], x_test[:TESTED], data.y_test[:TESTED]


def replica(plan: Plan) -> Replica:
    """This rank's copy of the model, with its optimizer."""
    rate = RATES[plan.optimizer]
    if plan.framework == "numpy":
        return NumpyNetwork(SIZES, activation="tanh", optimizer=plan.optimizer, lr=rate, seed=1)
    import torch

    from trainers.replicas.pytorch.replica import TorchReplica

    module = torch_module()
    return TorchReplica(module, torch.nn.CrossEntropyLoss(), torch_optimizer(plan, module))


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


def without_faults(plan: Plan, left_out: int | None = None) -> tuple[np.ndarray, float]:
    """Return the parameters and the test accuracy of the same training on one rank. left_out: the number of a step to
    leave out."""
    with ONE_AT_A_TIME:
        return _without_faults(plan.framework, plan.optimizer, left_out)


@functools.cache
def _without_faults(framework: str, optimizer: str, left_out: int | None) -> tuple[np.ndarray, float]:
    model = replica(Plan(0, 1, framework=framework, optimizer=optimizer))
    x, y, x_test, y_test = rows()
    batches = Batches(Arrays((x, y)), BATCH, 0, 1)
    for epoch in range(EPOCHS):
        for step, batch in enumerate(batches.epoch(epoch), epoch * batches.steps):
            if step != left_out:
                model.gradients(*batch.data, batch.share)
                model.update()
    sums = dict(zip(model.metrics, model.evaluate(x_test, y_test), strict=True))
    return model.state()["parameters"].copy(), float(sums["accuracy"]) / TESTED
