"""The training of a case in a PyTorch loop, with MirroredOptimizer."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import allreduce
from allreduce.arrays.chunks import chunk
from allreduce.errors import RankLostError
from tests.faults.points import die
from tests.matrix import alone
from tests.matrix.case import Case
from tests.matrix.trained import average_of, transforms_of
from trainers import ClipNorm
from trainers.pytorch import Buckets, MirroredOptimizer
from trainers.pytorch.transforms import INSTEAD

MOMENTS = ("before backward", "in backward", "before step")  # in which a rank dies


class Loop:
    """A module with one MirroredOptimizer, or one for each layer.

    done: the steps that were taken, or left out by SkipNotFinite. Collective.
    """

    def __init__(self, case: Case, ranks: allreduce.Topology, path: str, resumes: bool) -> None:
        self.case, self.path = case, path
        self.module, plain = alone.torch_model(case)
        saved = torch.load(path, weights_only=False) if resumes else None
        if saved is not None:
            self.module.load_state_dict(saved["model"])
        made = {"topology": ranks, "transforms": self.transforms(), **self.options()}
        self.optimizers = [MirroredOptimizer(each, self.module, case.backend, **made) for each in plain]
        self.rates = [group["lr"] for group in self.groups]
        self.done = 0
        if saved is not None:
            self.load(saved)

    def options(self) -> dict[str, Any]:
        case = self.case
        update = "sharded" if case.owner.startswith("sharded") else "replicated"
        options = {"update": update, "average": average_of(case), "compress": case.compress or None}
        if case.average != "LocalSGD":
            options["buckets"] = Buckets(case.buckets, 1e-4, 1e-4)
        return options

    def transforms(self) -> list[Any]:
        """Return those that the loop does not do itself."""
        own = (*INSTEAD, ClipNorm) if self.case.way == "clip" else tuple(INSTEAD)
        return [each for each in transforms_of(self.case) if not isinstance(each, own)]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def ranks(self) -> allreduce.Topology:
        return self.optimizers[0].topology

    def save(self) -> None:
        """Write the model and the optimizers' state."""
        state: dict[str, Any] = {"model": self.module.state_dict(), "done": self.done}
        state["optimizers"] = [each.state_dict() for each in self.optimizers]
        if self.ranks.rank == 0:
            torch.save(state, f"{self.path}.new")
            os.replace(f"{self.path}.new", self.path)
        self.ranks.world.Barrier()

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.module.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.done = saved["done"]

    def step(self, x: torch.Tensor, y: torch.Tensor, at: Callable[[str], None]) -> None:
        """One step on a global batch. at: called in some moments of the step."""
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * self.case.fraction(self.done)
        own = self.case.share(len(x), self.ranks.size, self.ranks.rank)
        for optimizer in self.optimizers:
            optimizer.rows(len(x[own]))
        if self.case.way == "closure":
            self.optimizers[0].step(lambda: self.backward(x[own], y[own], at))
        else:
            self.backward(x[own], y[own], at)
            at("before step")
            for optimizer in self.optimizers:
                if self.case.way == "clip" and (norm := self.case.argument("ClipNorm")):
                    self.clip(optimizer, norm)
                optimizer.step()
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate
        self.done += 1

    def backward(self, x: torch.Tensor, y: torch.Tensor, at: Callable[[str], None]) -> torch.Tensor:
        """Compute the gradients of this rank's rows, in several parts if they are accumulated; returns the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.case.seed % 2 == 0)
        at("before backward")
        if not len(x) and self.case.seed % 3:
            return torch.zeros(())
        parts = self.case.argument("Accumulate") or 1
        total = torch.zeros(())
        for number in range(parts):
            rows = chunk(len(x), parts, number)
            weight = len(x[rows]) / max(1, len(x))
            value = self.loss(x[rows], y[rows]) * weight if weight else self.nothing(x)
            total += value.detach()
            if number + 1 < parts:
                with contextlib.ExitStack() as stack:
                    for optimizer in self.optimizers:
                        stack.enter_context(optimizer.no_sync())
                    value.backward()
            else:
                hook = self.module[-1].weight.register_hook(lambda _: at("in backward"))
                value.backward()
                hook.remove()
        return total

    def clip(self, optimizer: MirroredOptimizer, norm: float) -> None:
        """Clip the averages, by the optimizer or by PyTorch."""
        if self.case.seed % 2:
            optimizer.clip_grad_norm_(norm)
        else:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.module(x), y)

    def nothing(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss without gradients, of a rank that has no rows."""
        return self.module(x.new_zeros(1, x.shape[1])).sum() * 0


def train(case: Case, ranks: allreduce.Topology, resumes: bool, path: str) -> np.ndarray:
    """Train as `trained.train` does; a stop saves the state in `path`. Collective."""
    loop = Loop(case, ranks, path, resumes)
    batches = [[*map(torch.from_numpy, batch[:2])] for epoch in case.batches() for batch in epoch]
    last = case.stop if case.resumed and not resumes else len(batches)
    goes_back = case.killed >= 0 and case.owner == "sharded optimizer"

    def dies(moment: str) -> None:
        if ranks.rank == case.killed and loop.done == case.stop and moment == MOMENTS[case.seed % 3]:
            die()

    while loop.done < last:
        try:
            if goes_back:
                loop.save()
            loop.step(*batches[loop.done], dies)
        except RankLostError:
            if goes_back:
                loop.load(torch.load(path, weights_only=False))
            else:
                loop.done = loop.optimizers[0].steps + loop.optimizers[0].steps_skipped
    if last != len(batches):
        for optimizer in loop.optimizers:
            optimizer.synchronize() if case.average == "LocalSGD" else None
        loop.save()
    for optimizer in loop.optimizers:
        optimizer.close()
    trained = [each for each in loop.module.parameters() if each.requires_grad]
    return np.concatenate([each.detach().numpy().reshape(-1) for each in trained])
