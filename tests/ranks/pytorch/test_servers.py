"""PyTorch modules under parameter servers and spare replicas, on 1 to 3 ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import allreduce
from tests.ranks.training.fits import data
from trainers import Loader, MirroredTrainer, ParameterServerTrainer, SpareReplicasTrainer
from trainers.errors import ArgumentError
from trainers.replicas.pytorch import TorchReplica
from trainers.trainer import Trainer

torch.set_num_threads(1)
SIZE = MPI.COMM_WORLD.size


def replica(dtype: Any = torch.float32) -> TorchReplica:
    """Return a replica with running statistics, which follow the gradients, and two learning rates.

    No bias before the batch norm: its gradients are rounding errors, which Adam would scale to full steps.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3)).to(dtype)
    groups = [{"params": module[:2].parameters()}, {"params": module[3].parameters(), "lr": 0.01}]
    return TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Adam(groups, lr=0.02))


@pytest.mark.skipif(SIZE < 2, reason="a server and a worker")
def test_synchronous_servers_update_whole_tensors(flat: allreduce.Topology) -> None:
    """Of an optimizer that reads whole tensors each server gets some; the worker gets none."""
    x, y = data(96)
    states = []
    for servers in (0, SIZE - 1):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 20, bias=False), nn.Linear(20, 8, bias=False), nn.Linear(8, 3, bias=False))
        made = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.Muon(module.parameters(), lr=0.02))
        trainer: Trainer
        if servers:
            trainer = ParameterServerTrainer(made, flat, servers=servers, updates="sync")
            assert flat.rank > 0 or trainer.strategy.owners.own_part == slice(0, 0)
        else:
            trainer = MirroredTrainer(made, "ring", flat)
        with trainer:
            trainer.fit(x, y, 2, 24, progress=False)
        states.append(made.state())
    for name, array in states[0].items():
        np.testing.assert_allclose(array, states[1][name], rtol=1e-2, atol=1e-4, err_msg=name)


@pytest.mark.skipif(SIZE < 2, reason="a server and a worker")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_asynchronous_training_of_a_module(
    dtype: Any, flat: allreduce.Topology, world: MPI.Intracomm, tmp_path: Path
) -> None:
    x, y = data(96)
    path = world.bcast(str(tmp_path / "model.npz"))
    mine = replica(dtype)
    with ParameterServerTrainer(mine, flat, stale="scale") as trainer:
        first = trainer.evaluate(x, y)
        history = trainer.fit(x, y, 8, 24, progress=False)
        last = trainer.evaluate(x, y)
        trainer.save(path)
        assert len(set(trainer.parameters_sha256())) == 1
    assert last["loss"] < first["loss"]
    assert [sum(epoch.staleness) for epoch in history] == [4 * (SIZE - 1)] * 8
    assert mine.learning_rates == [0.02, 0.01]
    assert len(set(world.allgather(mine.state()["module.1.running_mean"].tobytes()))) == 1
    assert mine.state()["module.1.running_mean"].any()
    with SpareReplicasTrainer(replica(dtype), flat, spare=SIZE - 1) as trainer:
        trainer.load(path)
        assert trainer.evaluate(x, y)["loss"] == pytest.approx(last["loss"], rel=1e-2)
        assert (trainer.replica.state()["optimizer.step"] == 8 * 4 * (SIZE - 1)).all()
        trainer.fit(x, y, 1, 24, progress=False)


@pytest.mark.skipif(SIZE < 2, reason="a server and a worker")
@pytest.mark.parametrize("server", [0, SIZE - 1])
def test_workers_begin_with_the_running_statistics_of_the_model(server: int, flat: allreduce.Topology) -> None:
    """Servers have the model's own statistics, or those loaded later, until a worker has sent others."""
    x, y = data(96)
    mine = replica()
    norm = mine.module[1]
    norm.momentum = 0.0  # so they never change
    norm.running_mean.fill_(5)
    with ParameterServerTrainer(mine, flat, servers=(server,)) as trainer:
        trainer.fit(x, y, 1, 24, progress=False)
        assert (norm.running_mean == 5).all()
        assert (norm.running_var == 1).all()
        mine.load_state(mine.state() | {"module.1.running_mean": np.full(20, 7, np.float32)})
        trainer.fit(x, y, 1, 24, progress=False)
        assert (norm.running_mean == 7).all()


def test_a_module_that_has_no_slices_is_refused(flat: allreduce.Topology) -> None:
    torch.manual_seed(0)
    module = nn.Linear(6, 3)

    class Own(torch.optim.SGD):
        """An optimizer that is not known to work on slices."""

    with pytest.raises(ArgumentError, match=r"SpareReplicasTrainer .* Own can't be used") as caught:
        SpareReplicasTrainer(TorchReplica(module, nn.CrossEntropyLoss(), Own(module.parameters())), flat, spare=0)
    assert caught.value.ranks == tuple(range(SIZE))


def test_gradients_of_a_stream_are_not_multiplied_by_its_rows(flat: allreduce.Topology) -> None:
    """A gradient of 3000 times 40 rows would be infinite in float16."""
    module = nn.Linear(1, 1, bias=False).to(torch.float16)
    nn.init.constant_(module.weight, 0.5)
    made = TorchReplica(module, nn.L1Loss(), torch.optim.SGD(module.parameters(), lr=1e-5))
    rows = 40 - flat.rank  # of each batch of this rank
    batches = [(np.full((rows, 1), 3000, "float16"), np.zeros((rows, 1), "float16"))] * 3
    with SpareReplicasTrainer(made, flat, spare=0) as trainer:
        trainer.fit(Loader(batches, rows="divided"), epochs=1, progress=False)
        assert len(set(trainer.parameters_sha256())) == 1
    np.testing.assert_allclose(made.state()["parameters"], 0.5 - 3 * 0.03, rtol=2e-3)
