"""One rank of a training with all shipped callbacks, in which rank DIES is killed in epoch 2.

    mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.watched continue DIES FOLDER
    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.watched standby DIES FOLDER [injected]

With `injected`, a callback raises an error on the rank that has joined. Each rank prints the result of its fit, and
that of one rank alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from allreduce import Topology
from allreduce.elastic import standby
from allreduce.transport import processes
from tests.faults.moments.training import BATCH, data, network
from tests.faults.points import InjectedError, die
from trainers import MirroredTrainer, Schedule
from trainers.callbacks import (
    Callback,
    CheckDivergence,
    CheckGradients,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    TensorBoard,
    Timeline,
)

EPOCHS = 12
RATES = Schedule(lambda step: 0.95 ** (step // 5))
JOINED = 3  # the number of the rank that joins


class Story(Callback):
    """Kills a rank, and records the learning rates of each epoch."""

    def __init__(self, dies: int, injected: bool) -> None:
        self.dies, self.injected = dies, injected
        self.rates: dict[int, float] = {}
        self.began_as: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.began_as = self.trainer.rank

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, 2) and processes.here()[0] == self.dies:
            die()
        if self.injected and self.epoch == 4 and processes.here()[0] == JOINED:
            raise InjectedError("by the rank that has joined")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates[self.epoch] = self.trainer.replica.learning_rates[0]


def fitted(topology: Topology, folder: Path, story: Story, **options: Any) -> dict[str, Any]:
    x, y = data()
    early = EarlyStopping("loss", mode="max", patience=3, start_from_epoch=4, restore_best_weights=True)
    callbacks = [
        early,
        ModelCheckpoint(folder / "best.npz", "loss", save_best_only=True),
        ModelCheckpoint(folder / "{epoch}.npz"),
        TensorBoard(folder / "logs", update_freq="batch"),
        CSVLogger(folder / "log.csv"),
        CheckDivergence(every=1),
        CheckGradients(),
        Timeline(folder / "trace.json"),
        story,
    ]
    with MirroredTrainer(network(topology.rank), topology=topology, **options) as trainer:
        history = trainer.fit(x, y, EPOCHS, BATCH, callbacks=callbacks, transforms=[RATES], progress=False)
        return {
            "rank": trainer.rank,
            "ranks": trainer.size,
            "began as": story.began_as,
            "loss": history.column("loss"),
            "rates": story.rates,
            "stopped": [early.stopped_epoch, early.best_epoch, early.best],
            "predicted": trainer.evaluate(x, y)["loss"],
        }


def main(way: str, dies: str, folder: str, *injected: str) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # tensorboardX would import it, and works without
    ranks: Topology | None = Topology()
    if way == "standby":
        ranks = standby.elastic_world(ranks, 1)
    if ranks is None:
        return
    late = isinstance(ranks, standby.JoiningRank)
    came = fitted(ranks, Path(folder), Story(int(dies), bool(injected)), on_failure="continue")
    alone = Path(folder) / f"alone {processes.here()[0]}"
    alone.mkdir()
    came["alone"] = fitted(Topology(MPI.COMM_SELF), alone, Story(-1, False))
    print(json.dumps(came | {"late": late, "number": processes.here()[0]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
