"""Training with compressed gradients: accuracy, parts of the model, checkpoints with the error feedback."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce import notices
from tests.ranks.together import raised
from tests.ranks.training.fits import fail, on_last
from trainers import Checkpoint, MirroredTrainer, NumpyNetwork
from trainers.errors import CheckpointError

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.skipif(size == 1, reason="one rank compresses nothing")
EPOCHS, BATCH = 4, 90


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    x = random.normal(size=(540, 64)).astype("float32")
    return x, np.argmax(x @ random.normal(size=(64, 10)), axis=1)


def trainer_of(topology: allreduce.Topology, seed: int = 2, **options: Any) -> MirroredTrainer:
    network = NumpyNetwork([64, 100, 10], optimizer="momentum", lr=0.1, seed=seed)
    return MirroredTrainer(network, options.pop("allreduce", "ring"), topology, **options)


def fitted(trainer: MirroredTrainer, **options: Any) -> list[float]:
    x, y = data()
    return trainer.fit(x, y, batch_size=BATCH, **{"epochs": EPOCHS, "progress": False, **options}).column("loss")


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_the_loss_falls_as_without_compression(update: str, flat: allreduce.Topology) -> None:
    with trainer_of(flat, update=update) as plain:
        right = fitted(plain)
    for compress in ("bfloat16", "int8", "powersgd:4"):
        with trainer_of(flat, update=update, compress=compress) as trainer:
            losses = fitted(trainer)
            assert len(set(trainer.parameters_sha256())) == 1
        assert losses != right
        assert losses[-1] < right[0] - 0.7 * (right[0] - right[-1]), compress


@pytest.mark.parametrize("compress", ["int8", "powersgd:4"])
def test_a_resumed_training_has_the_same_bits(compress: str, flat: allreduce.Topology, folder: Path) -> None:
    """A checkpoint holds each rank's error feedback, and PowerSGD's Q."""
    with trainer_of(flat, compress=compress) as trainer:
        whole, expected = fitted(trainer), trainer.parameters_sha256()
        unsent = trainer.allreduce.state()
        assert any(name.endswith("/residual") and array.any() for name, array in unsent.items())
    with trainer_of(flat, compress=compress) as trainer, pytest.raises(OSError, match="disk is full"):
        fitted(trainer, checkpoint=Checkpoint(str(folder), "epoch"), callbacks=on_last("on_epoch_begin", fail, epoch=2))
    with trainer_of(flat, seed=5, compress=compress) as trainer:
        resumed = fitted(trainer, checkpoint=str(folder), resume=True)
        assert trainer.parameters_sha256() == expected
        again = trainer.allreduce.state()
        assert again.keys() == unsent.keys()
        assert all(np.array_equal(again[name], unsent[name]) for name in unsent)
        trainer.save(f"{folder}.npz")
        trainer.load(f"{folder}.npz")
        assert trainer.allreduce.state() == {}  # a model has no error feedback
    assert resumed == whole
    with trainer_of(flat) as trainer:
        text = raised(CheckpointError, partial(fitted, trainer, checkpoint=str(folder), resume=True))
        assert "has no state" in text, text


@pytest.mark.skipif(size < 3, reason="resumes on fewer ranks, but on several")
def test_fewer_ranks_begin_without_error_feedback(
    topology_of: Callable[..., Any], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    with trainer_of(topology_of(None), compress="int8") as trainer:
        fitted(trainer, epochs=1, checkpoint=str(folder))
        assert any(name.endswith("/residual") for name in trainer.allreduce.state())
    two = MPI.COMM_WORLD.Split(rank < 2)
    if rank < 2:
        with allreduce.Topology(two) as topology, trainer_of(topology, compress="int8") as trainer:
            fitted(trainer, epochs=1, checkpoint=str(folder), resume=True)
            assert not any(name.endswith("/residual") for name in trainer.allreduce.state())
        assert caplog.text.count("begins at zero") == (rank == 0)
    two.Free()
