"""Runs of MirroredOptimizer: a loop that continues after a RankLostError, as in docs/programs/run_survive_torch.py.
tests.matrix has loops that go back to a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce import create
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults.notes import Notes, members
from tests.faults.plans import ALONE, BATCH, ROUND, STEPS, Plan
from tests.faults.points import WrongResultError
from tests.faults.programs import model
from trainers import ClipNorm, LocalSGD, Sharded
from trainers.data import Arrays, Batches
from trainers.pytorch import MirroredOptimizer


class Loop:
    """The model of one rank, and the steps of its loop. Replicated, two optimizers train two copies of the model on one
    backend, so that a loss may come between their steps."""

    def __init__(self, plan: Plan, notes: Notes, topology: Topology) -> None:
        self._notes = notes
        self._x, self._y, *_ = model.rows()
        self.local = plan.program.startswith("local SGD")
        options: dict[str, Any] = {"transforms": [] if self.local else [ClipNorm(1e6)]}
        backend: Any = plan.backend
        if self.local:
            options["average"] = LocalSGD(ROUND, outer="diloco", fragments=2)
        elif plan.program.startswith("sharded"):
            options["update"] = Sharded(copies=plan.copies)
        else:
            options["buckets"] = model.buckets(plan)
            backend = create(plan.backend, topology)
        self.modules = [model.torch_module() for _ in range(2 if "buckets" in options else 1)]
        self.optimizers = [
            MirroredOptimizer(model.torch_optimizer(plan, module), module, backend, topology=topology, **options)
            for module in self.modules
        ]
        self.module, self.optimizer = self.modules[0], self.optimizers[0]

    @property
    def steps(self) -> int:
        """The number of steps that all optimizers have done."""
        return min(optimizer.steps for optimizer in self.optimizers)

    def step(self, number: int) -> None:
        """Do one step with this rank's share of its batch. Collective; raises RankLostError."""
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            if len(self.modules) > 1 and optimizer.steps > number:
                continue
            x, y = self._share(number)
            if not self.local:
                optimizer.rows(len(x))
            optimizer.zero_grad()
            forward(module, x, y).backward()
            optimizer.step()
        self._notes.step(number, self.optimizer.topology)

    def _share(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = self.optimizer.topology
        batches = Batches(Arrays((self._x, self._y)), BATCH, ranks.rank, ranks.size)
        epoch, place = divmod(number, batches.steps)
        x, y = batches.share(epoch, place, ranks.rank).data
        return torch.from_numpy(x), torch.from_numpy(y)


def forward(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(module(x), y)


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    left = _train(plan, notes, folder, topology)
    if model.trains_alone(plan, notes, left):
        (folder / ALONE).mkdir()
        _train(plan, Notes(folder / ALONE, 0), folder / ALONE, Topology(MPI.COMM_SELF))


def _train(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> list[int]:
    """Train, note the results, and return the ranks that are left. Collective."""
    loop = Loop(plan, notes, topology)
    while loop.steps < STEPS:
        try:
            loop.step(loop.steps)  # their number survives the failure
        except RankLostError as lost:
            print(lost, flush=True)
    if loop.local:
        loop.optimizer.synchronize()
    parameters = [_flat(module) for module in loop.modules]
    if not np.allclose(parameters[0], parameters[-1], atol=1e-5):  # other ranks may have done a step of the second one
        raise WrongResultError("two optimizers of equal models have other parameters")
    np.save(folder / f"parameters.{notes.rank}.npy", parameters[0])
    accuracy = _accuracy(loop.module)
    left = members(loop.optimizer.topology)
    for optimizer in loop.optimizers:
        optimizer.close()
    loop.optimizer.topology.close()
    notes.add("end", ranks=left, accuracy=accuracy, predicted=accuracy)
    return left


def _flat(module: torch.nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def _accuracy(module: torch.nn.Module) -> float:
    _, _, x_test, y_test = model.rows()
    with torch.no_grad():
        return float((module(torch.from_numpy(x_test)).argmax(1).numpy() == y_test).mean())
