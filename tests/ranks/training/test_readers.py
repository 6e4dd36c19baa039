"""Exact reads a data set so that a row follows from the row and the epoch alone, on any number of ranks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.training.fits import on_last, stop
from trainers import Exact, MirroredTrainer, NumpyNetwork
from trainers.data import Samples

JOBS = "openmpi 2"

torch = pytest.importorskip("torch")
ROWS, BATCH, EPOCHS = 23, 6, 2
WORLD = MPI.COMM_WORLD


class Noisy(torch.utils.data.Dataset):
    """Rows (number of the row, noise of all generators)."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return torch.tensor([row, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float32), row % 3


class Noting(NumpyNetwork):
    """Notes the rows that it has trained on, by their numbers."""

    def __init__(self) -> None:
        super().__init__([4, 5, 3], seed=1)
        self.trained: list[np.ndarray] = []

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        self.trained += list(x.copy())
        return super().gradients(x, y, share)


def exact(replica: NumpyNetwork, topology: allreduce.Topology) -> MirroredTrainer:
    return MirroredTrainer(replica, topology=topology, average=Exact(micro_batch=4))


def test_a_row_follows_from_the_row_and_the_epoch(flat: allreduce.Topology) -> None:
    replica = Noting()
    with exact(replica, flat) as trainer:
        trainer.fit(Noisy(), None, EPOCHS, BATCH, progress=False)
    found = [row for each in WORLD.allgather([row.tolist() for row in replica.trained]) for row in each]
    expected = [Samples(Noisy()).take(np.arange(ROWS), (0, epoch))[0].tolist() for epoch in range(EPOCHS)]
    assert sorted(found) == sorted(row for epoch in expected for row in epoch)


def test_resume_in_mid_epoch_on_other_ranks(flat: allreduce.Topology, folder: Path) -> None:
    """The bits do not depend on the ranks; the training stops in its first epoch."""

    def fitted(topology: allreduce.Topology, **options: Any) -> list[str]:
        with exact(NumpyNetwork([4, 5, 3], seed=1), topology) as trainer:
            trainer.fit(Noisy(), None, EPOCHS, BATCH, progress=False, **options)
            return trainer.parameters_sha256()

    wanted = set(fitted(flat))
    stopping = on_last("on_train_batch_end", stop, epoch=0)
    assert set(fitted(flat, checkpoint=str(folder), callbacks=stopping)) != wanted
    with allreduce.Topology(MPI.COMM_SELF) as single:
        found = fitted(single, checkpoint=str(folder), resume=True) if WORLD.rank == 0 else None
    assert set(WORLD.bcast(found)) == wanted
