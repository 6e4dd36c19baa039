"""One rank of a job in which servers die whose slices others keep too, and the training goes on without a checkpoint.

    mpirun --with-ft ulfm -n 5 python -m tests.faults.moments.servers UPDATES:SERVERS:MOMENT,MOMENT ...

One training after another, on the ranks that are left, of which the last SERVERS are servers; the first of these dies
at the first MOMENT (below), the second at the second. Prints, from rank 0, what came of each, as JSON.
"""

import json
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import RankLostError
from trainers import MirroredTrainer, ParameterServerTrainer
from trainers.base import Trainer
from trainers.callbacks import Callback
from trainers.serving import copies
from trainers.serving.desk import Desk
from trainers.serving.shard import Shard
from trainers.serving.steps import StepsTogether
from trainers.serving.stream import Stream
from trainers.serving.twin import Twin

from .training import BATCH, EPOCHS, ROWS, data, die, network

BATCHES = ROWS // BATCH
# What a server dies before, or after, and at which time: most are of the second epoch.
MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
    "begin": (Shard, "update", 1, False),  # nothing was kept but what the model began with
    "met": (StepsTogether, "_update_collected", BATCHES + 2, False),  # others may update
    "updated": (Shard, "update", BATCHES + 3, True),
    "reply": (Desk, "reply", BATCHES + 3, False),
    "unkept": (Twin, "send", BATCHES + 4, False),  # the others have updated, and its twin does not hear of it
    "kept": (Twin, "send", BATCHES + 4, True),
    "behind": (Shard, "update", 3 * BATCHES - 1, False),  # with several workers: in an epoch, behind some updates
    "epoch": (ParameterServerTrainer, "_come_together", 2, False),
    "evaluate": (ParameterServerTrainer, "_evaluate", 2, False),
    "repair": (copies, "pieces_sent", 1, False),  # of another loss
    "repaired": (ParameterServerTrainer, "_share_again", 2, True),
    "third fit": (Stream, "serve", EPOCHS + 2, False),  # as the second one, of one epoch: its twin has what that did
}
STOPS_IN = "unkept"  # where rank 0 also wants to stop, in the step that all go back to


class Stopping(Callback):
    """Stops the training in step BATCHES + 2."""

    def __init__(self) -> None:
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self.trainer.stop_training |= self._steps == BATCHES + 2


def dies(moment: str) -> None:
    """Have this rank die at a moment."""
    owner, name, times, after = MOMENTS[moment]
    action, count = getattr(owner, name), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == times and not after:
            die()
        result = action(*arguments, **options)
        if count == times:
            die()
        return result

    setattr(owner, name, dying)


def fits(trainer: Trainer, callbacks: list[Callback]) -> dict[str, Any]:
    """Three, for none of which counts what was done in those before."""
    x, y = data()
    options: dict[str, Any] = {"batch_size": BATCH, "progress": False}
    history = [*trainer.fit(x, y, EPOCHS, validation_data=(x[:50], y[:50]), callbacks=callbacks, **options)]
    history += trainer.fit(x, y, 1, **options)
    before = np.array(trainer.replica.state()["parameters"])
    history += trainer.fit(x, y, 1, **options)
    moved = trainer.replica.state()["parameters"] != before
    return {
        "history": [epoch.as_dict() for epoch in history],
        "moved": [bool(quarter.any()) for quarter in np.array_split(moved, 4)],
        "predicted": trainer.predict(x)[:5].tolist(),
    }


def run(updates: str, servers: int, moments: list[str]) -> None:
    stops = STOPS_IN in moments
    with Topology.of_survivors() as ranks:
        place = ranks.rank - (ranks.size - servers)
        if 0 <= place < len(moments):
            dies(moments[place])
        trainer = ParameterServerTrainer(
            network(0), ranks, servers=servers, updates=updates, copies=2, on_failure="continue"
        )
        parts = BATCHES * (1 if updates == "sync" else trainer.parts)
        try:
            came = fits(trainer, [Stopping()] if stops and ranks.rank == 0 else [])
        except RankLostError as error:
            if trainer.rank == 0:
                print(json.dumps({"error": str(error)}), flush=True)
            return
        came |= {
            "updates": updates,
            "servers": len(trainer.servers),
            "lost": len([rank for loss in trainer.losses for rank in loss.ranks]),
            "sha256": trainer.parameters_sha256(),
        }
        rank = trainer.rank
        trainer.close()
    if rank == 0:
        with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as alone:
            print(json.dumps(came | {"alone": fits(alone, [Stopping()] if stops else []), "parts": parts}), flush=True)


if __name__ == "__main__":
    for text in sys.argv[1:]:
        updates, servers, moments = text.split(":")
        run(updates, int(servers), moments.split(","))
