"""The rank of a soak (see tests.faults.soak): a training with standby ranks and checkpoints, until it is told to stop.

python -m tests.faults.programs.soak FOLDER SPARES
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from allreduce import Topology
from allreduce.elastic import standby
from tests.faults.notes import STOP, Notes, members
from tests.faults.plans import Plan
from tests.faults.programs import model
from trainers import Checkpoint, MirroredTrainer
from trainers.watching.callback import Callback

BATCH, REPEATS = 240, 1000  # rows; how often an epoch has all rows
EPOCHS = 10**9  # more than it can do before it is told to stop
NOTE_SECONDS = 0.05
EVERY = "10 seconds"  # between two checkpoints
PAGE_MIB = resource.getpagesize() / 2**20


class Notice(Callback):
    """Notes the ranks, the memory and the descriptors, at times and after each failure; stops the training."""

    reads_batches = False

    def __init__(self, notes: Notes, stop: Path) -> None:
        self._notes, self._stop = notes, stop
        self._noted, self._topology = 0.0, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, topology = time.monotonic(), self.trainer.topology
        if now - self._noted < NOTE_SECONDS and topology is self._topology:
            return
        self._noted, self._topology = now, topology
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB
        files = len(os.listdir("/proc/self/fd"))
        self._notes.add("at", ranks=members(topology), memory=memory, files=files)
        self.trainer.stop_training = self._stop.exists()


def main(folder: Path, spares: int) -> None:
    topology = Topology()
    notes = Notes(folder, topology.rank)
    notes.add("pid", pid=os.getpid())
    ranks = standby.elastic_world(topology, spares)
    if ranks is None:
        notes.add("end")
        return
    x, y, *_ = model.rows()
    x, y = np.tile(x, (REPEATS, 1)), np.tile(y, REPEATS)
    trainer = MirroredTrainer(model.replica(Plan(0, 1)), "auto", ranks, on_failure="continue")
    trainer.fit(
        x,
        y,
        EPOCHS,
        BATCH,
        callbacks=[Notice(notes, folder / STOP)],
        checkpoint=Checkpoint(str(folder.parent / "checkpoints"), EVERY),
        resume=True,
        progress=False,
    )
    notes.add("end", hashes=trainer.parameters_sha256())
    trainer.close()
    trainer.topology.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
