"""The model, the rows, the trainers and the callback that the tests of fits share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from trainers import (
    CentralStorageTrainer,
    Exact,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    SpareReplicasTrainer,
)
from trainers.watching.callback import Callback

SIZE = MPI.COMM_WORLD.size
ROWS, FEATURES = 50, 6
TRAINERS: dict[str, Callable[..., Any]] = {  # of which all ranks take every step together
    "replicated": partial(MirroredTrainer, allreduce="ring"),
    "sharded": partial(MirroredTrainer, allreduce="shared", update="sharded"),
    "central": CentralStorageTrainer,
    "sync": partial(ParameterServerTrainer, updates="sync"),
    "spare": partial(SpareReplicasTrainer, spare=0),
}
STRATEGIES = TRAINERS | {"async": ParameterServerTrainer}
EVERY: dict[str, Callable[..., Any]] = STRATEGIES | {
    "spare 1": partial(SpareReplicasTrainer, spare=1),
    "local": partial(MirroredTrainer, allreduce="ring", average=LocalSGD(3)),
    "exact": partial(MirroredTrainer, allreduce="ring", average=Exact(micro_batch=2)),
    "workers": partial(ParameterServerTrainer, ranks_per_worker=2),
}
LEAST = {"sync": 2, "async": 2, "spare 1": 2, "workers": 3}  # ranks


def network(**options: Any) -> NumpyNetwork:
    return NumpyNetwork([FEATURES, 8, 3], **{"seed": 1, **options})


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(rows, FEATURES)).astype("float32")
    return x, x[:, :3].argmax(1)


X, Y = data()  # which no test changes


def trainer_of(kind: str, topology: allreduce.Topology, replica: NumpyNetwork | None = None, **options: Any) -> Any:
    """Return one of EVERY; skips the test if there are too few ranks. Collective."""
    if topology.size < LEAST.get(kind, 1):
        pytest.skip(f"{kind} needs {LEAST[kind]} ranks")
    return EVERY[kind](replica or network(), topology=topology, **options)


class Rows:
    """A data set of these rows, (x, y) each. bad: a row that can't be read, and the error."""

    def __init__(self, x: np.ndarray, y: np.ndarray, bad: int | None = None, error: type[Exception] = OSError) -> None:
        self.x, self.y, self._bad, self._error = x, y, bad, error

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        if row == self._bad:
            raise self._error("this row is damaged")
        return self.x[row], int(self.y[row])


class Seen(Callback):
    """Counts the batches of this rank, and records their losses."""

    def __init__(self) -> None:
        self.batches, self.losses = 0, list[float]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.losses.append(logs["loss"])


class Once(Callback):
    """Calls an action at the first event of this name in this epoch or a later one, on this batch or a later one."""

    def __init__(self, event: str, action: Callable[[Any], Any], epoch: int = 1, batch: int = 1) -> None:
        self._event, self._action, self._first, self._batch = event, action, epoch, batch
        self._epoch, self._done = 0, False
        for name in ("on_epoch_begin", event):
            setattr(self, name, partial(self._at, name))

    def _at(self, event: str, *given: Any) -> None:
        if event == "on_epoch_begin":
            self._epoch = given[0]
        comes = event in ("on_train_begin", "on_train_end") or self._epoch >= self._first
        if event == self._event and comes and not self._done and ("batch" not in event or given[0] >= self._batch):
            self._done = True
            self._action(self.trainer)


def on_last(event: str, action: Callable[[Any], Any], epoch: int = 1, batch: int = 1) -> list[Callback]:
    """Return the callbacks of a fit: one that acts on the last rank, none on the others."""
    return [Once(event, action, epoch, batch)] if MPI.COMM_WORLD.rank == SIZE - 1 else []


def fail(trainer: Any) -> None:
    raise OSError("the disk is full")


def stop(trainer: Any) -> None:
    trainer.stop_training = True
