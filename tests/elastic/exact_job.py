"""A training with Exact in which ranks kill themselves; the last line has the SHA-256 of every remaining rank."""

import json
import os
import signal
import sys
from typing import Any

import numpy as np

from trainers import Exact, MirroredTrainer, Sharded
from trainers.callbacks import Callback
from trainers.replicas.numpy.network import NumpyNetwork

update, copies, dies = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])


class Dies(Callback):
    """Kills this process in a batch. when: "epoch batch" -> the rank that dies."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if dies.get(f"{self.epoch} {batch}") == self.trainer.rank and len(self.trainer.failures) < len(dies):
            os.kill(os.getpid(), signal.SIGKILL)


rng = np.random.default_rng(3)
x = rng.normal(size=(130, 20)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
with MirroredTrainer(
    NumpyNetwork([20, 300, 30, 2], seed=1),
    update=Sharded(copies=copies) if update == "sharded" else update,
    average=Exact(micro_batch=5),
    on_failure="continue" if dies else None,
) as trainer:
    history = trainer.fit(x, y, epochs=5, batch_size=37, progress=False, callbacks=[Dies()])
    found = trainer.parameters_sha256()
    if trainer.rank == 0:
        print(json.dumps([len(found), sorted(set(found)), [epoch.loss for epoch in history]]))
