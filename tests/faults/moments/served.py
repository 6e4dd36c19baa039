"""One rank of a job in which servers and workers kill themselves, and the others continue.

    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.served

The rank that is 0 at the end prints the result of each training, as a line of JSON.
"""

import json
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import RankLostError
from allreduce.transport import processes
from tests.faults.moments.training import BATCH, EPOCHS, Deaths, data, network
from tests.faults.points import die
from trainers import EMA, ClipNorm, MirroredTrainer, ParameterServerTrainer, Schedule, SpareReplicasTrainer

Moment = tuple[str, int, int]
OPTIONS: dict[str, Any] = {"transforms": [ClipNorm(1.0), EMA(0.9), Schedule("cosine", warmup=3)], "progress": False}


class WorkersDeath(Deaths):
    """Makes this worker die: ("part", epoch, 0): while it computes, in that epoch or later, because parts are dealt to
    whichever worker asks first."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        event, epoch, _ = self.moment or ("", 0, 0)
        if event == "part" and self.epoch >= epoch:
            die()
        super().on_train_batch_begin(batch)


def trained(name: str, make: Callable[..., Any], deaths: dict[int, Moment], **options: Any) -> None:
    """Train on all remaining ranks; some of them die."""
    with Topology.of_survivors() as ranks, make(network(0), ranks, on_failure="continue", **options) as trainer:
        x, y = data()
        moment = deaths.get(ranks.rank)
        watches = [WorkersDeath(moment)]
        history = trainer.fit(x, y, EPOCHS, BATCH, callbacks=watches, validation_data=(x[:50], y[:50]), **OPTIONS)
        ranks_now = trainer.topology.world
        came = {
            "history": [epoch.as_dict() for epoch in history],
            "ranks": trainer.size,
            "workers": getattr(trainer, "ranks_of_workers", ()),
            "servers": [processes.world_ranks(ranks_now)[rank] for rank in trainer.strategy.servers],
            "lost": [failure.ranks for failure in trainer.failures],
            "sha256": trainer.parameters_sha256(),
        }
        if trainer.rank == 0:
            print(json.dumps({"name": name, **came}), flush=True)


def alone() -> None:
    """Return the result of one rank alone."""
    x, y = data()
    with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as trainer:
        history = trainer.fit(x, y, EPOCHS, BATCH, validation_data=(x[:50], y[:50]), **OPTIONS)
    print(json.dumps({"name": "alone", "history": [epoch.as_dict() for epoch in history]}), flush=True)


def without_its_server() -> None:
    """The only server dies."""
    server = MPI.COMM_WORLD.Shrink().size - 1
    try:
        trained("no server", ParameterServerTrainer, {server: ("batch_begin", 1, 3)})
    except RankLostError as error:
        if error.ranks and MPI.COMM_WORLD.rank == min(error.ranks):
            print(json.dumps({"name": "no server", "error": str(error)}), flush=True)


if __name__ == "__main__":
    # Each moment is of the ranks that are left: the servers are the last ones, and rank 0 dies among others.
    trained("sync", ParameterServerTrainer, {4: ("batch_end", 1, 2)}, servers=2, updates="sync")
    trained("async", ParameterServerTrainer, {1: ("part", 1, 0), 0: ("epoch_end", 3, 0)}, servers=2)
    trained("spare", SpareReplicasTrainer, {2: ("batch_end", 2, 1)}, spare=0)
    if MPI.COMM_WORLD.Shrink().rank == 0:
        alone()
    without_its_server()
