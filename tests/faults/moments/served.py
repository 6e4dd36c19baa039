"""One rank of a job in which servers and workers kill themselves, and the others continue.

    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.served KIND

KIND: one of KINDS below. The rank that is 0 at the end prints the result of each training, as a line of JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from mpi4py import MPI

from allreduce import Topology
from allreduce.errors import RankLostError
from allreduce.transport import processes
from tests.faults.moments.training import BATCH, EPOCHS, Deaths, Source, data, network
from tests.faults.points import die
from trainers import (
    EMA,
    CentralStorageTrainer,
    ClipNorm,
    Loader,
    MirroredTrainer,
    ParameterServerTrainer,
    Schedule,
    SpareReplicasTrainer,
)
from trainers.recovery.recovery import Recovery

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


def trained(name: str, make: Callable[..., Any], deaths: dict[int, Moment], rows: str = "", **options: Any) -> None:
    """Train on all remaining ranks, with loaders of these rows if they are given; some ranks die."""
    with Topology.of_survivors() as ranks, make(network(0), ranks, on_failure="continue", **options) as trainer:
        x, y = data()
        part, parts = trainer.strategy.part, trainer.strategy.parts
        common: dict[str, Any] = {"epochs": EPOCHS, "callbacks": [WorkersDeath(deaths.get(ranks.rank))]}
        if rows:
            source = Source(part, parts) if rows == "divided" and part is not None else Source(0, 1)
            history = trainer.fit(Loader(None if part is None else source, rows=rows), **common, progress=False)
        else:
            history = trainer.fit(x, y, batch_size=BATCH, validation_data=(x[:50], y[:50]), **common, **OPTIONS)
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


def alone(**options: Any) -> None:
    """Print the result of one rank alone, on the rank that is 0 now."""
    if MPI.COMM_WORLD.Shrink().rank > 0:
        return
    x, y = data()
    with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as trainer:
        history = trainer.fit(x, y, EPOCHS, BATCH, validation_data=(x[:50], y[:50]), **options)
    print(json.dumps({"name": "alone", "history": [epoch.as_dict() for epoch in history]}), flush=True)


def without_its_server() -> None:
    """The only server dies."""
    server = MPI.COMM_WORLD.Shrink().size - 1
    try:
        trained("no server", ParameterServerTrainer, {server: ("batch_begin", 1, 3)})
    except RankLostError as error:
        if error.ranks and MPI.COMM_WORLD.rank == min(error.ranks):
            print(json.dumps({"name": "no server", "error": str(error)}), flush=True)


# Each moment is of the ranks that are left: the servers are the last ones, and rank 0 dies among others.


def arrays() -> None:
    trained("sync", ParameterServerTrainer, {4: ("batch_end", 1, 2)}, servers=2, updates="sync")
    trained("async", ParameterServerTrainer, {1: ("part", 1, 0), 0: ("epoch_end", 3, 0)}, servers=2)
    trained("spare", SpareReplicasTrainer, {2: ("batch_end", 2, 1)}, spare=0)
    alone(**OPTIONS)
    without_its_server()


def loaders() -> None:
    trained("sync", ParameterServerTrainer, {0: ("batch_begin", 1, 2)}, "divided", servers=2, updates="sync")
    trained("async, whole", ParameterServerTrainer, {1: ("part", 1, 0)}, "whole", servers=2)
    trained("async", ParameterServerTrainer, {0: ("part", 1, 0)}, "divided")
    trained("spare", SpareReplicasTrainer, {2: ("batch_end", 2, 1)}, "divided", spare=0)
    alone(progress=False)


def workers() -> None:
    """The first and the last of five workers of one rank die; then of the workers (0, 1) and (2) a rank that is no
    leader, and the whole last worker."""
    deaths = {0: ("batch_begin", 1, 2), 4: ("batch_end", 3, 1)}
    trained("sync", ParameterServerTrainer, deaths, updates="sync")
    deaths = {1: ("part", 1, 0), 2: ("epoch_end", 3, 0)}
    trained("async", ParameterServerTrainer, deaths, ranks_per_worker=2)
    alone(**OPTIONS)


def recovery(name: str, make: Callable[..., Any], **options: Any) -> None:
    """A worker dies, and another one when the remaining ranks meet to recover."""
    if MPI.COMM_WORLD.rank == 1:
        mock.patch.object(Recovery, "_meet", side_effect=die).start()
    trained(name, make, {0: ("part", 1, 0)}, **options)
    alone(**OPTIONS)


OWNER = 3
KINDS: dict[str, Callable[[], None]] = {
    "arrays": arrays,
    "loaders": loaders,
    "workers": workers,
    "central": partial(recovery, "central", CentralStorageTrainer, storage=OWNER),
    "sync": partial(recovery, "sync", ParameterServerTrainer, servers=[OWNER], updates="sync"),
    "async": partial(recovery, "async", ParameterServerTrainer, servers=[OWNER]),
}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
