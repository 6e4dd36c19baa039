"""Callbacks for `model.fit` on several ranks, with a MirroredOptimizer. Pass them on all ranks."""

from typing import Any

import keras
import numpy as np

from allreduce.transport.control import raise_together
from trainers.errors import ArgumentError
from trainers.keras.optimizer import mirror_variables, mirrored, wait_for_compiled


class StartFromFirstRank(keras.callbacks.Callback):
    """Copies the weights and the optimizer state of rank 0 to all ranks when fit begins. Collective.

    So only rank 0 needs to load weights. If a model is loaded together with its optimizer, load it on all ranks. The
    random state of layers is not copied. Raises ArgumentError on all ranks when the model is not built: begin it with a
    keras.Input, or call model.build.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer, error = mirrored(self.model), None
        if not (self.model.built and self.model.weights):
            error = ArgumentError(
                f"{self.model.name} is not built, so it has no weights yet into which rank 0's could be copied: begin "
                "it with a keras.Input(shape), or call model.build(shape) before fit"
            )
        raise_together(optimizer.topology.world, error)
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        mirror_variables([*self.model.weights, *optimizer.variables], optimizer.backend)


class AverageMetrics(keras.callbacks.Callback):
    """Averages the metrics of an epoch (numbers or arrays, also of the validation) over the ranks. Collective.

    Put it before callbacks that read metrics: then EarlyStopping, ReduceLROnPlateau and the history get the same values
    on all ranks. All ranks have the same weight, so give them equally many rows (`shard` does).
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        wait_for_compiled()
        values = {name: np.array(value, np.float64) for name, value in logs.items()}
        mirrored(self.model).backend(values, "mean", lossless=True)
        logs.update({name: value if value.ndim else float(value) for name, value in values.items()})
