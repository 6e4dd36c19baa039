"""An ensemble of 5 members on 4 ranks: rank 2 is killed in the fit, rank 1 is stopped and goes on, rank 3 is killed."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology
from trainers import NumpyNetwork, datasets
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.errors import DeadlineExceededError
from trainers.watching.callback import Callback

STOPPED = 25  # calls for which rank 1 is stopped
DEADLINE = 0.2


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
    pids = topology.world.allgather(os.getpid())
    rank = topology.rank
    ensemble = EnsembleTrainer(lambda seed: Counted([64, 10], seed=seed), 5, topology=topology)
    members = ensemble.fit(x, y, 4, callbacks=lambda number: [Dies()] if number == 2 else [], progress=False)
    assert [len(each.history) for each in members] == [4, 4, 0, 4, 4], members
    assert ensemble.missing == {2: "the ranks of its part were lost"}, ensemble.missing
    assert ensemble.topology.size == 3
    whole = ensemble.predict(x)
    assert whole.shape == (200, 10)
    pids = [pids[0], pids[1], pids[3]]
    stopped(ensemble, x, rank, pids[1])
    for _ in range(3):
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            time.sleep(0.5)
        found = ensemble.predict(x, deadline=30.0, quorum=3)  # the end of rank 3 is found, not the deadline waited for
        if rank == 0:
            assert found.members == (0, 1, 4)
            assert found.missing.keys() == {2, 3}
    after = ensemble.predict(x)
    assert ensemble.missing.keys() == {2, 3}, ensemble.missing
    assert not np.array_equal(after, whole)
    ensemble.close()
    print(f"rank {rank} ends", flush=True)


class Counted(NumpyNetwork):
    """Counts its predictions."""

    predictions = 0

    def predict(self, x: Any) -> Any:
        self.predictions += 1
        return super().predict(x)


def stopped(ensemble: EnsembleTrainer, x: np.ndarray, rank: int, pid: int) -> None:
    """Rank 1 computes none of the calls that it has missed, and the next one in time."""
    counted: Any = ensemble.replicas.get(1)
    before = counted and counted.predictions
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
    while rank == 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    for _ in range(STOPPED):
        found = missing(ensemble, x)
        assert rank or "rank 1: its vote had not come by the deadline" in found, found
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    whole = ensemble.predict(x, deadline=30.0, quorum=4)
    if rank == 0:
        assert whole.members == (0, 1, 3, 4), whole
    if rank == 1:
        assert 1 <= counted.predictions - before <= 3, counted.predictions - before
    ensemble.predict(x)  # rank 3 is not killed before


def missing(ensemble: EnsembleTrainer, x: np.ndarray) -> str:
    """Return on rank 0 who is missing at the deadline: on a busy machine rank 0 too."""
    try:
        found = ensemble.predict(x, deadline=DEADLINE)
    except DeadlineExceededError as error:
        return str(error)
    return "" if found is None else str(found.missing)


if __name__ == "__main__":
    main()
