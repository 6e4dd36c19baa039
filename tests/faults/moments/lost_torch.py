"""One rank of a job of eight. Seven kill themselves, one after the other, and the training continues on the rest.

    mpirun --with-ft ulfm -n 8 python -m tests.faults.moments.lost_torch FOLDER

Writes a checkpoint to FOLDER. Every remaining rank ends with the parameters of a training without failures, and prints
a line for each part.
"""

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allreduce  # prepares the environment of MPI, so it comes first
import tests.without_dynamo  # noqa: F401

# isort: split
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from allreduce.errors import RankLostError
from tests import launch
from tests.faults import points
from tests.faults.points import die
from trainers import ClipNorm, LocalSGD, MirroredTrainer, Sharded
from trainers.pytorch import Buckets, MirroredOptimizer
from trainers.replicas.pytorch import TorchReplica

STEPS, ROWS = 8, 24
SMALL_BUCKETS = {"first_mb": 0.001, "mb": 0.002}
torch.set_num_threads(1)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 17), nn.Tanh(), nn.Linear(17, 3))


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 12, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def reference(seed: int, steps: int = STEPS) -> nn.Module:
    model = network(seed)
    optimizer = plain(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def train(model: nn.Module, optimizer: MirroredOptimizer, at: Callable[[str, int], None]) -> None:
    """Do the next step, with this rank's rows. at: called with this rank's position."""
    step, ranks = optimizer.steps, optimizer.topology
    x, y = (each[ranks.rank :: ranks.size] for each in batch(step))
    optimizer.rows(len(x))
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    at("before backward", step)
    hook = model[2].weight.register_hook(lambda _: at("in backward", step))
    try:
        loss.backward()
    finally:
        hook.remove()
    at("before step", step)
    optimizer.step()


def check(part: str, topology: allreduce.Topology, *models: tuple[nn.Module, int]) -> None:
    """Check that the parameters equal those of one rank that trained alone, and in bits those of all remaining
    ranks."""
    for model, seed in models:
        for (name, here), there in zip(model.named_parameters(), reference(seed).parameters(), strict=True):
            torch.testing.assert_close(here.detach(), there.detach(), rtol=1e-4, atol=1e-5, msg=f"{part}: {name}")
        bits = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes()
        assert len(set(topology.world.allgather(bits))) == 1, part
    print(f"{part}: rank {MPI.COMM_WORLD.rank} is one of {topology.size}", flush=True)


def replicated(topology: allreduce.Topology, overlap: bool, place: str, victim: int) -> MirroredOptimizer:
    """A rank dies in the fourth step."""
    model = network(1)
    optimizer = MirroredOptimizer(
        plain(model),
        model,
        "ring",
        topology=topology,
        buckets=Buckets(overlap, **SMALL_BUCKETS),
        transforms=[ClipNorm(1e6)],
    )
    dies = topology.rank == victim
    lost = []
    while optimizer.steps < STEPS:
        try:
            train(model, optimizer, lambda at, step: die() if dies and (at, step) == (place, 3) else None)
        except RankLostError as error:
            lost.append(error.lost)
    assert lost == [(victim,)]
    check(f"replicated, {place}", optimizer.topology, (model, 1))
    return optimizer


def two(topology: allreduce.Topology) -> allreduce.Topology:
    """Two optimizers on one backend of the program; the first rank dies when one of them has done its step."""
    backend = allreduce.create("shared", topology)
    models = network(2), network(3)
    first, second = (MirroredOptimizer(plain(each), each, backend) for each in models)
    victim = topology.rank == 0
    while second.steps < STEPS:
        try:
            if first.steps == second.steps:
                train(models[0], first, lambda at, step: None)
            train(models[1], second, lambda at, step: die() if victim and (at, step) == ("in backward", 5) else None)
        except RankLostError as error:
            print(error, flush=True)
    left = second.topology
    assert first.topology is left
    check("two optimizers", left, (models[0], 2), (models[1], 3))
    return left


def sharded(topology: allreduce.Topology, folder: Path) -> None:
    """Rank 1 dies in its update, after which others may have updated: all go back to the last checkpoint."""
    model = network(4)
    optimizer = MirroredOptimizer(plain(model), model, topology=topology, update="sharded")
    file = folder / "checkpoint.pt"
    dies = topology.rank == 1
    step, told = -1, []
    while step < STEPS:
        try:
            if step < 0:
                saved = torch.load(file) if file.exists() else None
                if saved is not None:
                    model.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                step = 0 if saved is None else saved["step"]
            if step % 2 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                if optimizer.topology.rank == 0:
                    torch.save(state, folder / "new.pt")
                    os.replace(folder / "new.pt", file)
            x, y = (each[optimizer.topology.rank :: optimizer.topology.size] for each in batch(step))
            optimizer.rows(len(x))
            functional.cross_entropy(model(x), y).backward()
            if dies and step == 5:
                points.at("update slices", die)
            optimizer.step()
            step += 1
        except RankLostError as error:
            told.append(str(error))
            step = -1
    assert "load model and optimizer from the last checkpoint" in told[0]
    assert len(told) == 1
    check("sharded", optimizer.topology, (model, 4))
    optimizer.close()


def twice(topology: allreduce.Topology) -> MirroredOptimizer:
    """Rank 1 dies after its own update; another rank has a backup of its slice. The loop is that of replicated
    optimizers."""
    model = network(5)
    clips = [ClipNorm(1e6)]
    optimizer = MirroredOptimizer(plain(model), model, topology=topology, update=Sharded(copies=2), transforms=clips)
    told = []
    while optimizer.steps < STEPS:
        if optimizer.steps == 5 and topology.rank == 1 and not told:
            points.at("share slices", die)
        try:
            train(model, optimizer, lambda at, step: None)
        except RankLostError as error:
            told.append(str(error))
    assert len(told) == 1
    assert "last checkpoint" not in told[0], told
    check("sharded, kept twice", optimizer.topology, (model, 5))
    return optimizer


def local(topology: allreduce.Topology) -> None:
    """The last rank dies in a round, with an average under way: it costs a round at most."""
    model, average = network(6), LocalSGD(4, outer="diloco", fragments=2, delay=1)
    optimizer = MirroredOptimizer(plain(model), model, topology=topology, average=average)
    dies, told = topology.rank == topology.size - 1, []
    while optimizer.steps < 20:
        x, y = (each[optimizer.topology.rank :: optimizer.topology.size] for each in batch(optimizer.steps))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if dies and optimizer.steps == 6:
            die()
        try:
            optimizer.step()
        except RankLostError as error:
            told.append(error.lost)
            assert optimizer.state_dict()["local_sgd"]["momentum"].abs().max() > 0
    assert told == [(topology.size - 1,)]
    optimizer.synchronize()
    bits = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes()
    assert len(set(optimizer.topology.world.allgather(bits))) == 1
    print(f"local: rank {MPI.COMM_WORLD.rank} is one of {optimizer.topology.size}", flush=True)
    optimizer.close()


def of_trainer(topology: allreduce.Topology) -> None:
    """Rank 1 dies in the sixth backward, when the gradients of the last layer have been submitted."""
    x, y = (each.numpy() for each in batch(0))
    dies, models = topology.rank == 1, (network(7), network(7))
    calls = itertools.count(1)
    models[1][2].weight.register_hook(lambda _: die() if next(calls) == 6 and dies else None)
    ways = ((allreduce.Topology(MPI.COMM_SELF), Buckets(False)), (topology, Buckets(True, **SMALL_BUCKETS)))
    for model, (ranks, buckets) in zip(models, ways, strict=True):
        replica = TorchReplica(model, nn.CrossEntropyLoss(), plain(model))
        with MirroredTrainer(replica, "ring", ranks, buckets=buckets, on_failure="continue") as trainer:
            losses = [each.loss for each in trainer.fit(x, y, epochs=4, batch_size=8, progress=False, shuffle=False)]
            assert len(losses) == 4
            digests, left = trainer.parameters_sha256(), trainer.size
    assert len(digests) == left == topology.size - 1
    assert len(set(digests)) == 1
    for here, there in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    print(f"trainer: rank {MPI.COMM_WORLD.rank} is one of {left}", flush=True)


def recipe() -> allreduce.Topology:
    """The loop of docs/programs/run_survive_torch.py, without its kill; rank 3 dies before its hundredth step."""
    text = (launch.ROOT / "docs" / "programs" / "run_survive_torch.py").read_text()
    program, kills = re.subn(r"^    if [^\n]*:\n +os\.kill\([^\n]*\n", "", text, flags=re.MULTILINE)
    assert kills == 1
    if MPI.COMM_WORLD.rank == 3:
        points.at("update", die, turn=100)
    found: dict[str, Any] = {}
    exec(program, found)
    assert len(found["batch"]) in (13, 14)  # of 96
    assert functional.mse_loss(found["model"](found["x"]), found["y"]).item() < 0.1
    return allreduce.Topology.of_survivors()


def main() -> None:
    folder = Path(sys.argv[1])
    local(recipe())
    of_trainer(allreduce.Topology.of_survivors())
    left = allreduce.Topology.of_survivors()
    optimizer = replicated(left, True, "in backward", 1)
    left = optimizer.topology
    left = two(left)
    optimizer = twice(left)
    left = optimizer.topology
    sharded(left, folder)
    print("done", flush=True)


if __name__ == "__main__":
    main()
