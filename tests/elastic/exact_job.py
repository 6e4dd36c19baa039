"""Trainings with Exact: on 1, 2, ... ranks of the job, or on all of them, of which some kill themselves. Each training
prints a line: the number of its last ranks, their distinct SHA-256, and the losses."""

import json
import os
import signal
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import Topology
from trainers import Exact, MirroredTrainer, Sharded
from trainers.callbacks import Callback
from trainers.replicas.numpy.network import NumpyNetwork


class Dies(Callback):
    """Kills this process in a batch. when: "epoch batch" -> the rank that dies."""

    def __init__(self, when: dict[str, int]) -> None:
        self.when = when

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.when.get(f"{self.epoch} {batch}") == self.trainer.rank and len(self.trainer.failures) < len(self.when):
            os.kill(os.getpid(), signal.SIGKILL)


def train(topology: Topology, update: Any, dies: dict[str, int]) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(130, 20)).astype("float32")
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    network = NumpyNetwork([20, 300, 30, 2], seed=1)
    options = {"update": update, "average": Exact(micro_batch=5), "on_failure": "continue" if dies else None}
    with MirroredTrainer(network, topology=topology, **options) as trainer:
        history = trainer.fit(x, y, epochs=5, batch_size=37, progress=False, callbacks=[Dies(dies)])
        found = trainer.parameters_sha256()
        if trainer.rank == 0:
            print(json.dumps([len(found), sorted(set(found)), [epoch.loss for epoch in history]]), flush=True)


def main(copies: str = "", dies: str = "{}") -> None:
    """copies: of the slices; "" for trainings on 1, 2, ... ranks without failures."""
    world = MPI.COMM_WORLD
    if copies:
        train(Topology(), "replicated" if copies == "1" else Sharded(copies=int(copies)), json.loads(dies))
        return
    for ranks in range(1, world.size + 1):
        part = world.Split(0 if world.rank < ranks else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            train(Topology(part), "sharded" if ranks in (3, 5) else "replicated", {})


if __name__ == "__main__":
    main(*sys.argv[1:])
