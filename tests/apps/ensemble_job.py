"""Ensembles whose ranks end: mpirun -n N python -m tests.apps.ensemble_job PROGRAM [PATH]; see the functions."""

import logging
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from allreduce import Topology
from trainers import NumpyNetwork, datasets
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.fit.checkpointing import Checkpoint
from trainers.watching.callback import Callback


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(Callback):
    """Kills the last rank of the part in the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and self.trainer.group.rank == self.trainer.group.size - 1:
            die()


class Stops(Callback):
    """Sends SIGTERM to this rank in the second epoch; member 1 goes on slowly."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, logs: Any = None) -> None:
        time.sleep(0.5 * self._number)


class Fragile(NumpyNetwork):
    """A network in whose prediction its process is killed."""

    dies = False

    def predict(self, x: Any) -> Any:
        if self.dies:
            die()
        return super().predict(x)


def make(seed: int) -> Fragile:
    return Fragile([64, 10], seed=seed)


def rows() -> tuple[np.ndarray, np.ndarray]:
    data = datasets.load("digits")
    return data.x_train[:200], data.y_train[:200]


def members() -> None:
    """5 members on 4 ranks: rank 2 is killed in the fit, rank 3 before a prediction."""
    (x, y), topology = rows(), Topology.of_survivors()
    rank = topology.rank
    ensemble = EnsembleTrainer(make, 5, topology=topology)
    fitted = ensemble.fit(x, y, 4, callbacks=lambda number: [Dies()] if number == 2 else [], progress=False)
    assert [len(each.history) for each in fitted] == [4, 4, 0, 4, 4], fitted
    assert ensemble.missing == {2: "the ranks of its part were lost"}, ensemble.missing
    assert ensemble.topology.size == 3
    whole = ensemble.predict(x)
    assert whole.shape == (200, 10)
    ensemble.predict(x)  # so all ranks have `whole` before rank 3 is killed
    if rank == 3:
        die()
    after = ensemble.predict(x)
    assert ensemble.missing.keys() == {2, 3}, ensemble.missing
    assert not np.array_equal(after, whole)
    ensemble.close()
    print(f"rank {rank} ends", flush=True)


def parts(path: str) -> None:
    """2 members on 5 ranks, parts of 2 and 3 ranks: ranks are killed in a fit, in predictions, in a load."""
    (x, y), topology = rows(), Topology.of_survivors()
    first = topology.rank  # a name of this process
    ensemble = EnsembleTrainer(make, 2, topology=topology, trainer={"on_failure": "continue"})
    ensemble.fit(x, y, 3, callbacks=lambda number: [Dies()] if number == 1 else [], progress=False)
    assert [len(each.history) for each in ensemble.members] == [3, 3], ensemble.members
    assert (ensemble.missing, ensemble.topology.size) == ({}, 4)
    expected = ensemble.predict(x)
    for lost, left in ((3, 3), (1, 2)):
        for replica in ensemble.replicas.values():
            replica.dies = first == lost  # type: ignore[attr-defined]
        np.testing.assert_allclose(ensemble.predict(x), expected, atol=1e-6)
        assert (ensemble.missing, ensemble.topology.size) == ({}, left)
    assert set(ensemble.evaluate_members(x, y)) == {0, 1}
    ensemble.fit(x, y, 1, progress=False)
    ensemble.save(path)
    ensemble.close()
    print(f"rank {first} ends", flush=True)


def creation() -> None:
    """Rank 1 is killed while the ensemble is created."""
    topology = Topology()
    EnsembleTrainer(lambda seed: die() if topology.rank == 1 else make(seed), 3, topology=topology)


def sigterm(folder: str) -> None:
    """2 members on 2 parts: SIGTERM comes to both ranks, and the second part is slow to write."""
    (x, y), topology = rows(), Topology()
    ensemble = EnsembleTrainer(make, 2, topology=topology)
    try:
        ensemble.fit(x, y, 5, checkpoint=Checkpoint(folder), callbacks=lambda number: [Stops(number)], progress=False)
    except SystemExit as error:
        print(f"rank {topology.rank} ends with {error.code}, {len(os.listdir(folder))} folders", flush=True)
        raise


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    {"members": members, "parts": parts, "creation": creation, "sigterm": sigterm}[sys.argv[1]](*sys.argv[2:])
