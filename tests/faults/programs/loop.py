"""Runs of MirroredOptimizer: a loop that continues after a RankLostError, as in docs/programs/run_survive_torch.py."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allreduce import create
from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults.notes import Notes, members
from tests.faults.plans import BATCH, ROUND, STEPS, Plan
from tests.faults.points import WrongResultError
from tests.faults.programs import model
from trainers import ClipNorm, LocalSGD, Sharded
from trainers.data import Arrays, Batches
from trainers.pytorch import MirroredOptimizer

FILE = "checkpoint.pt"


class Loop:
    """The model of one rank, and the steps of its loop. Replicated, two optimizers train two copies of the model on one
    backend, so that a loss may come between their steps."""

    def __init__(self, plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
        self._notes, self._folder = notes, folder
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

    def save(self, step: int) -> None:
        """Write a checkpoint before a step. Collective; raises RankLostError."""
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        if self.optimizer.topology.rank == 0:
            torch.save(state, self._folder / "new.pt")
            os.replace(self._folder / "new.pt", self._folder / FILE)

    def load(self) -> int:
        """Load the newest checkpoint; return the next step. Collective; raises RankLostError."""
        if not (self._folder / FILE).exists():
            raise RuntimeError("a rank was lost before there was a checkpoint")
        state: dict[str, Any] = torch.load(self._folder / FILE, weights_only=True)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def forward(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(module(x), y)


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    loop = Loop(plan, notes, folder, topology)
    goes_back = plan.program.startswith("sharded") and plan.copies == 1
    (_go_back if goes_back else _go_on)(loop, plan)
    if loop.local:
        loop.optimizer.synchronize()
    parameters = [_flat(module) for module in loop.modules]
    if not np.allclose(parameters[0], parameters[-1], atol=1e-5):  # other ranks may have done a step of the second one
        raise WrongResultError("two optimizers of equal models have other parameters")
    np.save(folder / f"parameters.{notes.rank}.npy", parameters[0])
    accuracy = _accuracy(loop.module)
    ranks = members(loop.optimizer.topology)
    for optimizer in loop.optimizers:
        optimizer.close()
    loop.optimizer.topology.close()
    notes.add("end", ranks=ranks, accuracy=accuracy, predicted=accuracy)


def _go_on(loop: Loop, plan: Plan) -> None:
    """Continue from the optimizers' number of steps, which survives the failure."""
    while loop.steps < STEPS:
        try:
            loop.step(loop.steps)
        except RankLostError as lost:
            print(lost, flush=True)


def _go_back(loop: Loop, plan: Plan) -> None:
    """Go back to the last checkpoint, because slices of the optimizer's state are lost."""
    step, lost = 0, False
    while step < STEPS:
        try:
            if lost:
                step, lost = loop.load(), False
            if step % plan.checkpoint == 0:
                loop.save(step)
            loop.step(step)
            step += 1
        except RankLostError as error:
            print(error, flush=True)
            lost = True


def _flat(module: torch.nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


def _accuracy(module: torch.nn.Module) -> float:
    _, _, x_test, y_test = model.rows()
    with torch.no_grad():
        return float((module(torch.from_numpy(x_test)).argmax(1).numpy() == y_test).mean())
