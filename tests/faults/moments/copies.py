"""One rank of a job in which ranks with backups of their slices die, and the others continue without a checkpoint.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.copies KIND:RANKS_PER_NODE:MOMENT:RANK,RANK ...

One training after another, on the remaining ranks; in each of them these RANKs, as numbered in it, die at a MOMENT
(below). KIND: central, or the backend of a sharded update. Rank 0 prints the result of each as JSON.
"""

import json
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import RankLostError
from tests.faults import points
from tests.faults.moments.training import BATCH, EPOCHS, ROWS, data, network
from trainers import EMA, CentralStorageTrainer, ClipNorm, MirroredTrainer, Schedule, Sharded
from trainers.callbacks import Callback

BATCHES = ROWS // BATCH
STEP = BATCHES + 1  # in which they die: the first after an edit
# The point, how many times the rank comes to it in that step, and whether it dies before or after it.
MOMENTS = {
    "update": ("update", 1, True),  # parameters are half updated
    "gathered": ("back up", 1, False),
    "exchange": ("back up an array", 5, False),  # 3 are received; one array was sent, and another was not
    "sent": ("wait for a backup", 4, False),  # 3 were received
    "kept": ("back up", 1, True),
    "evaluated": ("evaluate", 1, True),  # the average is in the place of the parameters
}
OPTIONS: dict[str, Any] = {"transforms": [ClipNorm(1.0), EMA(0.9), Schedule("cosine", warmup=3)], "progress": False}


class Halving(Callback):
    """Halves the parameters after the first epoch."""

    collective = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self.trainer.edit(self.halve)

    def halve(self) -> None:
        self.trainer.replica.parameters *= 0.5


class Dying(Callback):
    """Makes this rank die in step STEP, at `moment`."""

    def __init__(self, moment: str) -> None:
        self._moment, self._step = moment, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step != STEP:
            return
        if self._moment == "batch":
            points.die()
        point, turn, after = MOMENTS[self._moment]
        points.at(point, points.die, turn, after)


def make(kind: str, ranks: Topology) -> MirroredTrainer:
    if kind == "central":
        return CentralStorageTrainer(network(0), ranks, copies=2, on_failure="continue")
    return MirroredTrainer(network(0), kind, ranks, update=Sharded(copies=2), on_failure="continue")


def run(kind: str, nodes: int, moment: str, dying: list[int]) -> None:
    x, y = data()
    with Topology.of_survivors(ranks_per_node=nodes) as ranks:
        trainer = make(kind, ranks)
        callbacks = [Halving(), *([Dying(moment)] if ranks.rank in dying else [])]
        try:
            history = trainer.fit(x, y, EPOCHS, BATCH, callbacks=callbacks, validation_data=(x, y), **OPTIONS)
        except RankLostError as error:
            if trainer.rank == 0:
                print(json.dumps({"error": str(error)}), flush=True)
            return
        came = {
            "kind": kind,
            "ranks": trainer.size,
            "lost": len([rank for failure in trainer.failures for rank in failure.ranks]),
            "sha256": trainer.parameters_sha256(),
            "history": [epoch.as_dict() for epoch in history],
            "predicted": trainer.predict(x)[:5].tolist(),
        }
        rank = trainer.rank
        trainer.close()
    if rank == 0:
        with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as alone:
            history = alone.fit(x, y, EPOCHS, BATCH, callbacks=[Halving()], validation_data=(x, y), **OPTIONS)
            came["alone"] = [epoch.as_dict() for epoch in history]
            came["predicted alone"] = alone.predict(x)[:5].tolist()
        print(json.dumps(came), flush=True)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        kind, nodes, moment, dying = text.split(":")
        np.seterr(all="ignore")
        run(kind, int(nodes), moment, [int(rank) for rank in dying.split(",")])
