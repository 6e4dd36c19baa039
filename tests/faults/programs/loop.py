"""Runs of MirroredOptimizer: a loop that continues after a RankLostError, as in docs/programs/run_survive_torch.py."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allreduce.errors import RankLostError
from allreduce.topology import Topology
from tests.faults.notes import Notes, members
from tests.faults.plans import BATCH, STEPS, Plan
from tests.faults.programs import model
from trainers.data import Arrays, Batches
from trainers.pytorch import MirroredOptimizer

FILE = "checkpoint.pt"


class Loop:
    """The model of one rank, and the steps of its loop."""

    def __init__(self, plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
        self._plan, self._notes, self._folder = plan, notes, folder
        self._x, self._y, *_ = model.rows()
        self.module = model.torch_module()
        plain = model.torch_optimizer(plan, self.module)
        update = "sharded" if plan.program.startswith("sharded") else "replicated"
        self.optimizer = MirroredOptimizer(plain, self.module, plan.backend, topology=topology, update=update)

    def step(self, number: int) -> None:
        """Do one step with this rank's share of its batch. Collective; raises RankLostError."""
        x, y = self._share(number)
        self.optimizer.rows(len(x))
        self.optimizer.zero_grad()
        loss = forward(self.module, x, y)
        hook = self.module[2].weight.register_hook(lambda _: backward())
        try:
            loss.backward()
        finally:
            hook.remove()
        self.optimizer.step()
        self._notes.step(number, self.optimizer.topology)

    def _share(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = self.optimizer.topology
        batches = Batches(Arrays((self._x, self._y)), BATCH, ranks.rank, ranks.size)
        epoch, place = divmod(number, batches.steps)
        batch = batches.share(epoch, place, ranks.rank)
        return torch.from_numpy(batch.x), torch.from_numpy(batch.y)

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


def backward() -> None:
    """Called when backward is halfway; a named point."""


def run(plan: Plan, notes: Notes, folder: Path, topology: Topology) -> None:
    loop = Loop(plan, notes, folder, topology)
    (_go_back if plan.program.startswith("sharded") else _go_on)(loop, plan)
    np.save(folder / f"parameters.{notes.rank}.npy", _flat(loop.module))
    accuracy = _accuracy(loop.module)
    ranks = members(loop.optimizer.topology)
    loop.optimizer.close()
    loop.optimizer.topology.close()
    notes.add("end", ranks=ranks, accuracy=accuracy, predicted=accuracy)


def _go_on(loop: Loop, plan: Plan) -> None:
    """Continue from the optimizer's number of steps, which survives the failure."""
    while loop.optimizer.steps < STEPS:
        try:
            loop.step(loop.optimizer.steps)
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
