"""One rank of a training in which ranks kill themselves, and new ones are started in their places.

    mpirun --with-ft ulfm -n 3 python -m tests.faults.moments.renewing

Two of three ranks die in an epoch, one of them the chief, and one of those that have come later in a second fit. Those
that are left wait with the epochs until new ranks are ready, so that it does not matter how long those take.
"""

import json
import time
from typing import Any

from mpi4py import MPI

from allreduce import Topology, ending, newcomers
from trainers import MirroredTrainer

from .training import BATCH, Deaths, data, network

FIRST, SECOND = {0: ("batch_begin", 1, 2), 2: ("batch_end", 1, 3)}, {4: ("batch_begin", 1, 1)}
EPOCHS = 4


class Waiting(Deaths):
    """Waits before an epoch until those that were started are ready to join. moments: by a rank's number in the job."""

    def __init__(self, moments: dict[int, tuple[str, int, int]]) -> None:
        super().__init__(None)
        self._moments = moments

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        started, deadline = self.trainer._survival.renewal._newcomers, time.monotonic() + 60
        while started is not None and not all(map(started._ready, started._new)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.moment = self._moments.get(ending.here()[0])
        super().on_train_batch_begin(batch, logs)


def fits(trainer: MirroredTrainer, first: list[Any], second: list[Any]) -> list[dict[str, Any]]:
    """The epochs of two fits, the second of which depends on what an evaluation between them says."""
    x, y = data()
    given: dict[str, Any] = {"validation_data": (x[:50], y[:50]), "progress": False}
    history = trainer.fit(x, y, EPOCHS, BATCH, callbacks=first, **given)
    seed = int(trainer.evaluate(x, y)["accuracy"] * len(x) + 0.5)
    return [
        epoch.as_dict() for epoch in [*history, *trainer.fit(x, y, EPOCHS, BATCH, seed=seed, callbacks=second, **given)]
    ]


def main() -> None:
    late, ranks = newcomers.started(), Topology()
    x, y = data()
    with MirroredTrainer(network(ranks.rank), topology=ranks, on_failure="replace") as trainer:
        history = fits(trainer, [Waiting(FIRST)], [Waiting(SECOND)])
        came = {
            "history": history,
            "ranks": trainer.size,
            "lost": [loss.ranks for loss in trainer.losses],
            "sha256": trainer.parameters_sha256(),
            "evaluated": trainer.evaluate(x, y),
            "predicted": trainer.predict(x)[:3].tolist(),
        }
        trainer.fit(x, y, 1, BATCH, progress=False)
    with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as alone:
        came["alone"] = fits(alone, [], [])
        came["predicted alone"] = alone.predict(x)[:3].tolist()
    print(json.dumps(came | {"late": late, "number": ending.here()[0]}), flush=True)


if __name__ == "__main__":
    main()
