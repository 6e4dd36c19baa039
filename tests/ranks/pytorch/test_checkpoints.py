"""Checkpoints of PyTorch modules: dropout, batch norm and schedules continue; MirroredOptimizer with
torch.distributed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import allreduce
import allreduce.torch_backend
from tests.ranks.pytorch import trained
from tests.ranks.pytorch.trained import both_updates, mine, network
from tests.ranks.training.fits import Once, data
from trainers import Checkpoint, MirroredTrainer
from trainers.errors import CheckpointError
from trainers.files import checkpoint as files
from trainers.pytorch import MirroredOptimizer
from trainers.replicas.pytorch import TorchReplica
from trainers.watching.callback import Callback

JOBS = "openmpi 2"  # once is enough


def momentum(module: nn.Sequential) -> torch.optim.Optimizer:
    """In the second group only."""
    groups = [{"params": module[:1].parameters()}, {"params": module[1:].parameters(), "momentum": 0.9, "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.05)


OPTIMIZERS: dict[str, Callable[[nn.Sequential], torch.optim.Optimizer]] = {
    "momentum": momentum,
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
}


def replica(optimizer: str, hidden: int = 8) -> TorchReplica:
    module = nn.Sequential(
        nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, 3)
    )
    return TorchReplica(module, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](module))


class Slower(Callback):
    """A user's schedule, which keeps a number in the groups as those of PyTorch do."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for group in self.trainer.replica.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] *= 0.5


@both_updates
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dropout_and_statistics_go_on(optimizer: str, update: str, flat: allreduce.Topology, folder: Path) -> None:
    x, y = data(60)
    kill = Once("on_train_batch_begin", lambda _: 1 // 0, epoch=1, batch=3)

    def fit(seed: int, **options: Any) -> tuple[list[float], list[np.ndarray]]:
        torch.manual_seed(10 * seed + flat.rank)  # dropout differs between the ranks
        with MirroredTrainer(replica(optimizer), "shared", flat, update=update) as trainer:
            history = trainer.fit(x, y, 3, 12, progress=False, **{"callbacks": [Slower()], **options})
        return history.column("loss"), list(trainer.replica.state().values())

    losses, expected = fit(1)
    with pytest.raises(ZeroDivisionError):
        fit(1, checkpoint=Checkpoint(str(folder), "2 steps"), callbacks=[Slower(), kill])
    flat.agree([], "rank 0 has written")
    found = files.newest(str(folder))
    assert found is not None
    assert str(found[1].progress) == "epoch 2, step 4"
    resumed, state = fit(7, checkpoint=str(folder), resume=True)
    assert resumed == losses
    for here, there in zip(state, expected, strict=True):
        assert np.array_equal(here, there)
    with MirroredTrainer(replica(optimizer, hidden=9), "shared", flat) as trainer:
        words = r"it has 0.weight of shape \(8, 6\) where this one has 0.weight of shape \(9, 6\)"
        with pytest.raises(CheckpointError, match=words):
            trainer.fit(x, y, 3, 12, progress=False, checkpoint=str(folder), resume=True)


def step(model: nn.Module, optimizer: MirroredOptimizer, number: int) -> None:
    x, y = (mine(each[number]) for each in trained.data(7))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def process_group(world: MPI.Intracomm) -> Iterator[None]:
    dist.init_process_group("allreduce")
    yield
    world.Barrier()
    dist.destroy_process_group()


@both_updates
def test_a_plain_loop_goes_on_with_the_same_bits(
    update: str, flat: allreduce.Topology, folder: Path, process_group: None
) -> None:
    """Without a scheduler the plain optimizer's state may also be loaded before it is wrapped."""
    adamw, model, again = trained.OPTIMIZERS["adamw"], network(), network(seed=2)
    with MirroredOptimizer(adamw(model.parameters()), model, topology=flat, update=update) as optimizer:
        for number in range(4):
            step(model, optimizer, number)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        distributed.save(parts, checkpoint_id=folder)
        for number in range(4, 7):
            step(model, optimizer, number)
    plain = adamw(again.parameters())
    parts = dict(zip(("model", "optimizer"), get_state_dict(again, plain), strict=True))
    distributed.load(parts, checkpoint_id=folder)
    set_state_dict(again, plain, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    with MirroredOptimizer(plain, again, topology=flat, update=update) as resumed:
        for number in range(4, 7):
            step(again, resumed, number)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
