"""One rank of a training in which a rank kills itself at a named moment, and the others stop with a checkpoint; and of
one that resumes.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.training TRAINING [OPTION=VALUE ...]

TRAINING: one of TRAININGS below. The rank that is 0 at the end prints the result as JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import Topology
from tests.faults.points import die
from trainers import (
    EMA,
    Checkpoint,
    ClipNorm,
    MirroredTrainer,
    NumpyNetwork,
    ParameterServerTrainer,
)
from trainers.callbacks import Callback, LearningRateSchedule

ROWS, BATCH, EPOCHS = 210, 42, 6  # batches that 1 to 3 ranks can divide, and 4 can't
STEP = {"transforms": [ClipNorm(1.0), EMA(0.9)]}  # options of every step


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(ROWS, 8)).astype(np.float32), random.integers(0, 3, ROWS)


def network(seed: int) -> NumpyNetwork:
    return NumpyNetwork([8, 16, 3], seed=seed, lr=0.01)


def schedule() -> LearningRateSchedule:
    """A schedule whose rate of an epoch depends on all epochs before it."""
    return LearningRateSchedule(lambda epoch, rate: 0.9 * rate)


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


def stop(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """The chief dies, and the others stop with a checkpoint of their position. moment: EVENT,EPOCH,BATCH."""
    event, epoch, batch = options["moment"].split(",")
    deaths = Deaths((event, int(epoch), int(batch)) if ranks.rank == 0 else None)
    return stopped(MirroredTrainer(network(0), topology=ranks), deaths, options["folder"])


def resumed(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """A training that was stopped resumes, and no rank dies. Return its result, and that of one rank alone."""
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50]), "progress": False, **STEP}
    deaths = Deaths(None)
    with MirroredTrainer(network(ranks.rank), topology=ranks, on_failure="continue") as trainer:
        callbacks = [deaths, schedule()]
        history = trainer.fit(
            x, y, EPOCHS, BATCH, callbacks=callbacks, checkpoint=options["folder"], resume=True, **given
        )
        came = {
            "history": [epoch.as_dict() for epoch in history],
            "sha256": trainer.parameters_sha256(),
            "predicted": trainer.predict(x)[:3].tolist(),
            "told": deaths.told,
            "rank": trainer.rank,
        }
    with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as alone:
        came["alone"] = [epoch.as_dict() for epoch in alone.fit(x, y, EPOCHS, BATCH, callbacks=[schedule()], **given)]
        came["predicted alone"] = alone.predict(x)[:3].tolist()
    return came


def stop_apart(ranks: Topology, options: dict[str, str]) -> dict[str, Any]:
    """A worker dies in an asynchronous epoch, in whose middle no checkpoint can be written, and the others stop."""
    deaths = Deaths(("epoch_begin", 1, 0) if ranks.rank == 0 else None)
    trainer = ParameterServerTrainer(network(0), topology=ranks)
    return stopped(trainer, deaths, Checkpoint(options["folder"], every="2 epochs"))


def stopped(trainer: Any, deaths: Deaths, checkpoint: Checkpoint | str) -> dict[str, Any]:
    callbacks = [deaths, schedule()]
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50]), "progress": False, **STEP}
    trainer.fit(x, y, EPOCHS, BATCH, callbacks=callbacks, checkpoint=checkpoint, **given)
    raise AssertionError("nobody has stopped")


TRAININGS: dict[str, Callable[[Topology, dict[str, str]], dict[str, Any]]] = {
    "stop": stop,
    "resumed": resumed,
    "stop apart": stop_apart,
}


def main(name: str, *options: str) -> None:
    ranks = Topology()
    came = TRAININGS[name](ranks, dict(option.split("=") for option in options))
    if came["rank"] == 0:
        print(json.dumps(came), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
