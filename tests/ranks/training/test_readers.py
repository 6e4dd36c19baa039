"""fit(workers=): what a row becomes follows from the row and the epoch alone; errors reach all ranks; workers end."""

import functools
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.together import raised_everywhere
from tests.ranks.training.test_fit import Once
from trainers import CentralStorageTrainer, MirroredTrainer, NumpyNetwork, ParameterServerTrainer, SpareReplicasTrainer
from trainers.data import Samples
from trainers.errors import ArgumentError, DataError

torch = pytest.importorskip("torch")
ROWS, BATCH, EPOCHS = 23, 6, 2
WORLD = MPI.COMM_WORLD
TRAINERS: dict[str, Any] = {
    "mirrored": MirroredTrainer,
    "sharded": functools.partial(MirroredTrainer, update="sharded"),
    "local": functools.partial(MirroredTrainer, sync_every=2),
    "exact": functools.partial(MirroredTrainer, exact=True, micro_batch=4),
    "central": CentralStorageTrainer,
    "sync": functools.partial(ParameterServerTrainer, updates="sync"),
    "async": ParameterServerTrainer,
    "spare": SpareReplicasTrainer,
}


class Noisy(torch.utils.data.Dataset):
    """Rows (number of the row, noise of all generators). In a worker, row `bad` is an error, or ends the worker."""

    def __init__(self, bad: int | None = None, kills: bool = False) -> None:
        self.bad, self.kills = bad, kills

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        if row == self.bad and multiprocessing.parent_process() is not None:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such picture")
        return torch.tensor([row, random.random(), np.random.rand(), torch.rand(())], dtype=torch.float32), row % 3


class Noting(NumpyNetwork):
    """Notes the rows that it has trained on and evaluated, by their numbers."""

    def __init__(self) -> None:
        super().__init__([4, 5, 3], seed=1)
        self.trained: list[np.ndarray] = []
        self.evaluated: list[np.ndarray] = []

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        self.trained += list(x.copy())
        return super().gradients(x, y, share)

    def evaluate(self, x: np.ndarray, y: np.ndarray, *weights: Any) -> Any:
        self.evaluated += list(x.copy())
        return super().evaluate(x, y, *weights)


def expected(epoch: int) -> np.ndarray:
    x, _ = Samples(Noisy()).take(np.arange(ROWS), (0, epoch))
    return x


def everyone(rows: list[np.ndarray]) -> np.ndarray:
    """Return the rows of all ranks, sorted."""
    found = [row for each in WORLD.allgather([row.tolist() for row in rows]) for row in each]
    return np.array(sorted(found), np.float32)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_row_becomes_follows_from_the_row_and_the_epoch(
    kind: str, workers: int, flat: allreduce.Topology
) -> None:
    if flat.size == 1 and kind in ("sync", "async", "spare"):
        pytest.skip("it needs another rank")
    if workers and kind in ("sharded", "central"):
        pytest.skip("they read rows as mirrored does")
    replica = Noting()
    own = random.getstate(), torch.get_rng_state()
    with TRAINERS[kind](replica, topology=flat) as trainer:
        validates = Noisy() if kind == "exact" else None
        trainer.fit(Noisy(), None, EPOCHS, BATCH, validation_data=validates, workers=workers, progress=False)
    now = random.getstate(), torch.get_rng_state()
    found = everyone(replica.trained)
    both = np.concatenate([expected(epoch) for epoch in range(EPOCHS)])
    both = both[np.lexsort(both.T[::-1])]  # sorted
    if kind == "spare":  # leaves rows out
        assert {tuple(row) for row in found} <= {tuple(row) for row in both}
    else:
        np.testing.assert_array_equal(found, both)
    if validates is not None:
        np.testing.assert_array_equal(everyone(replica.evaluated), np.repeat(expected(0), EPOCHS, axis=0))
    assert not multiprocessing.active_children()
    if kind != "exact":  # which seeds the model's random numbers
        assert own[0] == now[0]
        assert torch.equal(own[1], now[1])


def test_evaluate(flat: allreduce.Topology) -> None:
    found = []
    with MirroredTrainer(NumpyNetwork([4, 5, 3], seed=1), topology=flat) as trainer:
        for workers in (0, 1):
            found.append(trainer.evaluate(Noisy(), workers=workers))
    assert found[0] == found[1]
    assert not multiprocessing.active_children()


def test_resume_in_mid_epoch_with_other_workers_and_ranks(flat: allreduce.Topology, folder: Path) -> None:
    """exact=True, whose bits do not depend on the ranks; the training stops in its second epoch."""

    def fitted(topology: allreduce.Topology, workers: int, **options: Any) -> list[str]:
        with TRAINERS["exact"](NumpyNetwork([4, 5, 3], seed=1), topology=topology) as trainer:
            trainer.fit(Noisy(), None, EPOCHS, BATCH, workers=workers, progress=False, **options)
            return trainer.parameters_sha256()

    wanted = set(fitted(flat, 0))
    stop = Once("on_train_batch_end", lambda trainer: setattr(trainer, "stop_training", True))
    assert set(fitted(flat, 2, checkpoint=str(folder), callbacks=[stop])) != wanted
    with allreduce.Topology(MPI.COMM_SELF) as single:
        found = fitted(single, 1, checkpoint=str(folder), resume=True) if WORLD.rank == 0 else None
    assert set(WORLD.bcast(found)) == wanted


def test_an_error_of_a_worker_reaches_all_ranks(flat: allreduce.Topology) -> None:
    for kills, kind in ((False, "mirrored"), (True, "mirrored"), (False, "spare")):
        if flat.size == 1 and kind == "spare":
            continue
        with TRAINERS[kind](NumpyNetwork([4, 5, 3], seed=1), topology=flat) as trainer:
            fit = functools.partial(trainer.fit, Noisy(20, kills), None, EPOCHS, BATCH, workers=2, progress=False)
            text = raised_everywhere(WORLD, DataError, fit)
        assert ("the workers that read the Noisy have ended" if kills else "row 20: ValueError: no such") in text
        assert not multiprocessing.active_children()


class Unsendable(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: None


def test_bad_arguments(flat: allreduce.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = expected(0), np.arange(ROWS) % 3
    with MirroredTrainer(NumpyNetwork([4, 5, 3], seed=1), topology=flat) as trainer:

        def refused(text: str, *data: Any, kind: type[Exception] = ArgumentError, **options: Any) -> None:
            found = raised_everywhere(WORLD, kind, lambda: trainer.fit(*data, epochs=1, progress=False, **options))
            assert text in found, found

        refused("workers must be an integer >= 0", Noisy(), workers=-1)
        refused("workers must be an integer >= 0", Noisy(), workers=True)
        refused("x is an array", x, y, workers=2)
        refused("leave out prefetch", Noisy(), workers=2, prefetch=True)
        refused("a loader reads its rows itself", [(x, y)], rows="whole", workers=2)
        refused("Can't pickle", Unsendable(), kind=DataError, workers=2)
        if flat.size > 1:
            refused("workers=given", Noisy(), kind=DisagreementError, workers=0 if WORLD.rank else None)
