"""A fit that continues when a rank is killed; rank 1 kills itself here, to show it.

mpirun --with-ft ulfm -n 4 python run_survive_fit.py
"""

import os
import signal

from trainers import MirroredTrainer, NumpyNetwork, Sharded, datasets
from trainers.callbacks import Callback


class KillRankOne(Callback):
    """A real program has no such callback."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 3 and not self.trainer.failures and self.trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


data = datasets.load("digits")
network = NumpyNetwork([data.features, 32, len(data.classes)])
network.scale_input(data.shift, data.scale)
with MirroredTrainer(network, update=Sharded(copies=2), on_failure="continue") as trainer:
    trainer.fit(data.x_train, data.y_train, epochs=8, batch_size=100, callbacks=[KillRankOne()])
    if trainer.rank == 0:
        print(f"{trainer.size} ranks at the end; failed: {trainer.failures[0].ranks}")
