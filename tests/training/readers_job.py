"""Run by test_readers.py on 2 ranks, of which rank 1 is killed in the second epoch: python -m ... FOLDER

Every worker writes its process number to FOLDER/workers-RANK.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.faults.points import die
from trainers import MirroredTrainer, NumpyNetwork
from trainers.watching.callback import Callback

ROWS, BATCH, EPOCHS = 20, 6, 3


class Numbers(torch.utils.data.Dataset):
    def __init__(self, path: Path) -> None:
        self.path, self.process = path, os.getpid()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if os.getpid() != self.process:
            with open(self.path, "a") as file:
                file.write(f"{os.getpid()} ")
            self.process = os.getpid()
        return np.array([row, np.random.rand()], np.float32), row % 3


class Noting(NumpyNetwork):
    """Adds up the rows that it trains on, by their numbers."""

    sums = np.zeros(ROWS)

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        np.add.at(self.sums, x[:, 0].astype(int), 1)
        return super().gradients(x, y, share)


class Dies(Callback):
    def __init__(self) -> None:
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, 1):
            die()


def main() -> None:
    network = Noting([2, 4, 3], seed=1)
    with MirroredTrainer(network, "ring", on_failure="continue") as trainer:
        first = trainer.rank
        rows = Numbers(Path(sys.argv[1]) / f"workers-{first}")
        callbacks = [Dies()] if first == 1 else []
        trainer.fit(rows, None, EPOCHS, BATCH, workers=1, callbacks=callbacks, progress=False)
        assert len(set(trainer.parameters_sha256())) == 1
        seen = network.sums
        trainer.topology.world.Allreduce(seen.copy(), seen)
        # the killed rank's own count is lost, and the step in which it was killed may be counted twice
        assert (seen >= EPOCHS - 2).all(), seen
        if trainer.rank == 0:
            print(f"all rows of {trainer.steps // -(-ROWS // BATCH)} epochs on {trainer.size} ranks", flush=True)


if __name__ == "__main__":
    main()
