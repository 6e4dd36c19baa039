"""Callbacks for `model.fit` on several ranks, with a MirroredOptimizer. Pass the same callbacks on all ranks."""

from functools import partial
from typing import Any

import keras
import numpy as np

from allreduce.transport.control import raise_together
from trainers.arguments import POSITIVE
from trainers.errors import ArgumentError
from trainers.keras.averaging import mirror_variables, wait_for_compiled
from trainers.keras.optimizer import mirrored

WARM_UP = 5  # epochs

CHANGE_TRAINING = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
HOOKS = [name for name in vars(keras.callbacks.Callback) if name.startswith("on_")]


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


class SaveOnFirstRank(keras.callbacks.Callback):
    """Wraps a callback that only rank 0 calls: ModelCheckpoint, TensorBoard, CSVLogger.

    The callback must not change the training, because the change would happen on rank 0 only. Callbacks in
    CHANGE_TRAINING raise ArgumentError.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise ArgumentError(f"SaveOnFirstRank takes a Keras callback, not {type(callback).__qualname__}")
        if isinstance(callback, CHANGE_TRAINING):
            raise ArgumentError(
                f"{type(callback).__name__} changes the training, here on rank 0 only: pass it to fit on all ranks "
                "without SaveOnFirstRank, after AverageMetrics (and give BackupAndRestore a different folder on each)"
            )
        self.callback = callback
        for name in HOOKS:
            if getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name):
                setattr(self, name, partial(self._forward, name))

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._first = mirrored(model).topology.rank == 0
        if self._first:
            self.callback.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._first:
            getattr(self.callback, name)(*args, **kwargs)


class WarmUp(keras.callbacks.Callback):
    """Multiplies the learning rate by the number of ranks, in equal steps over the first epochs (Goyal et al. 2017).

    Create the optimizer with the learning rate for one rank's batch. After the warm-up other callbacks may change it.

    epochs: of the warm-up. scale: the factor at its end; None: the number of ranks. verbose: 1 to print the rate.
    Raises ArgumentError for invalid numbers, and in fit when the optimizer's rate is a schedule.
    """

    def __init__(self, epochs: float = WARM_UP, *, scale: float | None = None, verbose: int = 0) -> None:
        super().__init__()
        if epochs is False or not (epochs == 0 or POSITIVE.holds(epochs)):
            raise ArgumentError(f"epochs must be a number >= 0, got {epochs!r}")
        if scale is not None and not POSITIVE.holds(scale):
            raise ArgumentError(f"scale must be a number > 0, got {scale!r}")
        self.epochs, self.scale, self.verbose = epochs, scale, verbose
        self._rate = 0.0  # for one rank's batch; known when the first fit begins
        self._begun = self._over = False

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = mirrored(self.model)
        if self._begun:
            return
        self._rate = float(optimizer.learning_rate)
        try:
            self._set(1.0)
        except (AttributeError, TypeError) as error:
            raise ArgumentError(
                "WarmUp sets the learning rate, and this optimizer has a schedule: create it with a number, or let the "
                "schedule begin with the warm-up"
            ) from error
        self._begun = True
        self._scale = float(optimizer.topology.size if self.scale is None else self.scale)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._over:
            return
        if epoch >= self.epochs:
            self._set(self._scale)
            self._over = True
        if self.verbose and mirrored(self.model).topology.rank == 0:
            print(f"epoch {epoch + 1}: learning rate {self._part(0) * self._rate:g}", flush=True)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._over:
            if hasattr(self.model, "jax_state_sync"):  # else JAX would overwrite the rate that is set here
                self.model.jax_state_sync()
            self._set(self._part(batch))

    def _part(self, batch: int) -> float:
        done = self._epoch + (batch + 1) / (self.params.get("steps") or 1)
        return 1 + (self._scale - 1) * (min(done / self.epochs, 1.0) if self.epochs else 1.0)

    def _set(self, factor: float) -> None:
        mirrored(self.model).learning_rate = self._rate * factor
