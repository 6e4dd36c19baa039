"""One rank of a job with loaders, in which workers of servers and spare replicas kill themselves, and others continue.

    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.streams

The rank that is 0 at the end prints the result of each training, as a line of JSON.
"""

import json
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from allreduce import Topology
from tests.faults.moments.served import Moment, WorkersDeath
from tests.faults.moments.training import BATCH, EPOCHS, Source, data, network
from trainers import Loader, MirroredTrainer, ParameterServerTrainer, SpareReplicasTrainer


def trained(name: str, make: Callable[..., Any], deaths: dict[int, Moment], rows: str, **options: Any) -> None:
    """Train on all remaining ranks with loaders of these rows; some ranks die."""
    with Topology.of_survivors() as ranks, make(network(0), ranks, on_failure="continue", **options) as trainer:
        part, parts = trainer.strategy.part, trainer.strategy.parts
        loader = None if part is None else Source(part, parts) if rows == "divided" else Source(0, 1)
        watches = [WorkersDeath(deaths.get(ranks.rank))]
        history = trainer.fit(Loader(loader, rows=rows), epochs=EPOCHS, callbacks=watches, progress=False)
        came = {
            "history": [epoch.as_dict() for epoch in history],
            "ranks": trainer.size,
            "lost": [failure.ranks for failure in trainer.failures],
            "sha256": trainer.parameters_sha256(),
        }
        if trainer.rank == 0:
            print(json.dumps({"name": name, **came}), flush=True)


if __name__ == "__main__":
    # Each moment is of the ranks that are left: the servers are the last ones, and rank 0 dies among others.
    trained("sync", ParameterServerTrainer, {0: ("batch_begin", 1, 2)}, "divided", servers=2, updates="sync")
    trained("async, whole", ParameterServerTrainer, {1: ("part", 1, 0)}, "whole", servers=2)
    trained("async", ParameterServerTrainer, {0: ("part", 1, 0)}, "divided")
    trained("spare", SpareReplicasTrainer, {2: ("batch_end", 2, 1)}, "divided", spare=0)
    if MPI.COMM_WORLD.Shrink().rank == 0:
        x, y = data()
        with MirroredTrainer(network(0), topology=Topology(MPI.COMM_SELF)) as trainer:
            history = trainer.fit(x, y, EPOCHS, BATCH, progress=False)
        print(json.dumps({"name": "alone", "history": [epoch.as_dict() for epoch in history]}), flush=True)
