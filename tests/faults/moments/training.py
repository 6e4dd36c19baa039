"""One rank of a training in which rank 0 kills itself at a named moment, and the others stop with a checkpoint.

    mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.training FOLDER EVENT,EPOCH,BATCH [apart]

With `apart`, it is a worker of an asynchronous server, in the middle of whose epochs no checkpoint can be written.
"""

import sys
from typing import Any

import numpy as np

from allreduce import Topology
from tests.faults.points import die
from trainers import (
    EMA,
    Checkpoint,
    ClipNorm,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
    Schedule,
)
from trainers.callbacks import Callback
from trainers.watching.history import History

ROWS, BATCH, EPOCHS = 210, 42, 6  # batches that 1 to 3 ranks can divide, and 4 can't
STEP = {"transforms": [ClipNorm(1.0), EMA(0.9), Schedule(lambda step: 0.9 ** (step // 5))]}  # options of every step


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(ROWS, 8)).astype(np.float32), random.integers(0, 3, ROWS)


def network(seed: int) -> NumpyNetwork:
    return NumpyNetwork([8, 16, 3], seed=seed, lr=0.01)


class Deaths(Callback):
    """Makes this rank die at a moment: (event, epoch, batch), with batch 0 for events of epochs."""

    def __init__(self, moment: tuple[str, int, int] | None) -> None:
        self.moment, self.epoch = moment, -1
        self.told: list[str] = []

    def _come(self, event: str, batch: int = 0) -> None:
        self.told.append(f"{event} {self.epoch} {batch}")
        if (event, self.epoch, batch) == self.moment:
            die()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._come("epoch_begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._come("batch_begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._come("batch_end", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._come("epoch_end")


def fitted(trainer: Any, deaths: Deaths, checkpoint: Any = None, resume: bool = False) -> tuple[History, np.ndarray]:
    """Return the history of a training, and some predictions. Collective."""
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50]), "progress": False, **STEP}
    kept = {"checkpoint": checkpoint, "resume": resume}
    history = trainer.fit(x, y, EPOCHS, BATCH, callbacks=[deaths], **kept, **given)
    return history, trainer.predict(x)[:3]


def main(folder: str, moment: str, apart: str = "") -> None:
    ranks = Topology()
    event, epoch, batch = moment.split(",")
    deaths = Deaths((event, int(epoch), int(batch)) if ranks.rank == 0 else None)
    if apart:
        fitted(ParameterServerTrainer(network(0), topology=ranks), deaths, Checkpoint(folder, every="2 epochs"))
    else:
        fitted(MirroredTrainer(network(0), topology=ranks), deaths, folder)
    raise AssertionError("nobody has stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])
