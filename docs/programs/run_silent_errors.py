"""Detect a replica that differs.

mpirun -n 3 python run_silent_errors.py
"""

from allreduce.errors import DivergenceError
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
checks = [FlipBits(), CheckDivergence(every=5), CheckGradients("skip")]
with MirroredTrainer(network, allreduce="ring") as trainer:
    try:
        trainer.fit(data.x_train, data.y_train, epochs=3, batch_size=100, callbacks=checks)
    except DivergenceError as error:
        if trainer.rank == 0:
            print(error)
