"""An ensemble of 2 members on 2 parts: SIGTERM comes to both ranks, and the second part is slow to write."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from allreduce import Topology
from trainers import NumpyNetwork
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.fit.checkpointing import Checkpoint
from trainers.watching.callback import Callback


class Stops(Callback):
    """Sends SIGTERM to this rank in the second epoch; member 1 goes on slowly."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, logs: Any = None) -> None:
        time.sleep(0.5 * self._number)


def main() -> None:
    topology = Topology()
    x, y = np.zeros((40, 4), np.float32), np.arange(40) % 2
    ensemble = EnsembleTrainer(lambda seed: NumpyNetwork([4, 2], seed=seed), 2, topology=topology)
    try:
        ensemble.fit(x, y, 5, checkpoint=Checkpoint(sys.argv[1]), callbacks=lambda n: [Stops(n)], progress=False)
    except SystemExit as error:
        found = sorted(name for name in os.listdir(sys.argv[1]))
        print(f"rank {topology.rank} ends with {error.code}, {len(found)} folders", flush=True)
        raise


main()
