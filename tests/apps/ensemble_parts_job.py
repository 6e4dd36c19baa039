"""Ensembles of 2 members on 5 ranks, parts of 2 and 3 ranks: ranks are killed in a fit, in predictions, in a load."""

import logging
import os
import signal
import sys
from typing import Any

import numpy as np

from allreduce import Topology
from trainers import NumpyNetwork, datasets
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.watching.callback import Callback


class Dies(Callback):
    """Kills the last rank of the part in the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and self.trainer.group.rank == self.trainer.group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Fragile(NumpyNetwork):
    """A network in whose prediction its process is killed."""

    dies = False

    def predict(self, x: Any) -> Any:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(x)


def ensemble_of(topology: Topology, **trainer: Any) -> EnsembleTrainer:
    return EnsembleTrainer(lambda seed: Fragile([64, 10], seed=seed), 2, topology=topology, trainer=trainer)


def main(path: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    data = datasets.load("digits")
    x, y = data.x_train[:200], data.y_train[:200]
    topology = Topology.of_survivors()
    first = topology.rank  # a name of this process
    ensemble = ensemble_of(topology, on_failure="continue")
    ensemble.fit(x, y, 3, callbacks=lambda number: [Dies()] if number == 1 else [], progress=False)
    assert [len(each.history) for each in ensemble.members] == [3, 3], ensemble.members
    assert (ensemble.missing, ensemble.topology.size) == ({}, 4)
    expected = ensemble.predict(x)

    dies(ensemble, first == 3)
    np.testing.assert_allclose(ensemble.predict(x), expected, atol=1e-6)
    assert ensemble.topology.size == 3

    dies(ensemble, first == 1)
    np.testing.assert_allclose(ensemble.predict(x), expected, atol=1e-6)
    assert (ensemble.missing, ensemble.topology.size) == ({}, 2)
    assert set(ensemble.evaluate_members(x, y)) == {0, 1}
    ensemble.fit(x, y, 1, progress=False)
    ensemble.save(path)
    ensemble.close()
    print(f"rank {first} ends", flush=True)


def dies(ensemble: EnsembleTrainer, here: bool) -> None:
    """Let this rank be killed in its next prediction."""
    for replica in ensemble.replicas.values():
        replica.dies = here  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
