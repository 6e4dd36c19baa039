"""Detect a replica that differs, and repair it from the majority.

mpirun -n 3 python run_silent_errors.py
"""

from trainers import MirroredTrainer, NumpyNetwork, datasets
from trainers.callbacks import Callback, CheckDivergence, CheckGradients


class FlipBits(Callback):
    """Stands for a fault of the hardware: rank 1 changes one of its parameters."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and self.trainer.rank == 1:
            network.parameters[0] += 1.0


data = datasets.load("digits")
network = NumpyNetwork([data.features, 32, len(data.classes)])
network.scale_input(data.shift, data.scale)
checks = [FlipBits(), CheckDivergence(every=5, on_divergence="copy"), CheckGradients("skip")]
with MirroredTrainer(network, allreduce="ring") as trainer:
    trainer.fit(data.x_train, data.y_train, epochs=3, batch_size=100, callbacks=checks)
    if trainer.rank == 0:
        print("done")
