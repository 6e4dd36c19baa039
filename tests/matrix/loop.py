"""The training of a case in a PyTorch loop, with MirroredOptimizer."""

from typing import Any

import numpy as np
import torch

import allreduce
from allreduce.arrays.chunks import chunk
from tests.matrix import alone
from tests.matrix.case import Case
from tests.matrix.trained import average_of
from trainers import ClipNorm, SkipNotFinite
from trainers.pytorch import Buckets, MirroredOptimizer


def train(case: Case, ranks: allreduce.Topology, resumes: bool, path: str) -> np.ndarray:
    """Train as `trained.train` does; a stop saves the state in `path`. Collective."""
    first = case.stop if resumes else 0
    module, plain = alone.torch_model(case)
    update = "sharded" if case.owner.startswith("sharded") else "replicated"
    transforms: list[Any] = [SkipNotFinite()] if "SkipNotFinite" in case.transforms else []
    if "ClipNorm" in case.transforms:
        transforms.append(ClipNorm(case.numbers["ClipNorm"]))
    options = {"update": update, "average": average_of(case), "compress": case.compress or None}
    if case.average != "LocalSGD":  # during backward, in several buckets, or after it in one
        options["buckets"] = Buckets(case.seed % 2 == 0, 1e-4, 1e-4)
    if resumes:
        saved = torch.load(path, weights_only=False)
        module.load_state_dict(saved["model"])
    optimizer = MirroredOptimizer(plain, module, case.backend, topology=ranks, transforms=transforms, **options)
    rate = plain.param_groups[0]["lr"]
    if resumes:
        optimizer.load_state_dict(saved["optimizer"])
    batches = [(x, y) for epoch in case.batches() for x, y, _ in epoch]
    last = case.stop if case.stop and not resumes else len(batches)
    for number in range(first, last):
        optimizer.param_groups[0]["lr"] = rate * case.fraction(number)
        step(case, optimizer, module, *map(torch.from_numpy, batches[number]))
    optimizer.param_groups[0]["lr"] = rate
    if last != len(batches):
        optimizer.synchronize() if case.average == "LocalSGD" else None
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        if ranks.rank == 0:
            torch.save(state, path)
        ranks.world.Barrier()
    optimizer.close()
    return np.concatenate([each.detach().numpy().reshape(-1) for each in module.parameters()])


def step(case: Case, optimizer: Any, module: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """One step on a global batch. Collective."""
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy
    ranks = optimizer.topology
    own = case.share(len(x), ranks.size, ranks.rank)
    x, y = x[own], y[own]
    optimizer.rows(len(x))
    parts = case.numbers["Accumulate"] if "Accumulate" in case.transforms else 1
    for number in range(parts):
        rows = chunk(len(x), parts, number)
        weight = len(x[rows]) / max(1, len(x))
        value = loss(module(x[rows]), y[rows]) * weight if weight else module(x.new_zeros(1, x.shape[1])).sum() * 0
        if number + 1 < parts:
            with optimizer.no_sync():
                value.backward()
        else:
            value.backward()
    optimizer.step()
