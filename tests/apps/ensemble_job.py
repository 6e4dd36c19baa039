"""An ensemble of 5 members on 4 ranks: rank 2 is killed in the fit, rank 3 before a prediction."""

import logging
import os
import signal
from typing import Any

import numpy as np

from allreduce import Topology
from trainers import NumpyNetwork, datasets
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.watching.callback import Callback


class Dies(Callback):
    """Kills this rank in the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    data = datasets.load("digits")
    x, y = data.x_train[:200], data.y_train[:200]
    topology = Topology.of_survivors()
    rank = topology.rank
    ensemble = EnsembleTrainer(lambda seed: NumpyNetwork([64, 10], seed=seed), 5, topology=topology)
    members = ensemble.fit(x, y, 4, callbacks=lambda number: [Dies()] if number == 2 else [], progress=False)
    assert [len(each.history) for each in members] == [4, 4, 0, 4, 4], members
    assert ensemble.missing == {2: "the ranks of its part were lost"}, ensemble.missing
    assert ensemble.topology.size == 3
    whole = ensemble.predict(x)
    assert whole.shape == (200, 10)
    ensemble.predict(x)  # so all ranks have `whole` before rank 3 is killed
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    after = ensemble.predict(x)
    assert ensemble.missing.keys() == {2, 3}, ensemble.missing
    assert not np.array_equal(after, whole)
    ensemble.close()
    print(f"rank {rank} ends", flush=True)


if __name__ == "__main__":
    main()
