"""EarlyStopping: ends the fit when a metric has stopped improving."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.arguments import FLAG, integer, is_number, name_error, require
from trainers.errors import ArgumentError
from trainers.state import adopt
from trainers.state.adopt import Arrays
from trainers.watching.callback import Callback, Logs


class EarlyStopping(Callback):
    """Ends the fit, on all ranks, after `patience` epochs in which `monitor` did not improve. Keras' arguments.

    monitor: a name in the logs of an epoch: "val_loss", "loss", "accuracy", ...
    min_delta: a smaller or equal change is not an improvement.
    patience: the number of epochs without an improvement after which the fit ends.
    verbose: 1 to print a line on rank 0 when the fit stops.
    mode: "min", "max", or "auto", which goes by the name of the metric.
    baseline: an improvement counts only if the metric is better than this, too.
    restore_best_weights: at the end, load the model and the optimizer's state of the best epoch, of which rank 0 keeps
        a copy (with on_failure="continue" every rank). Then give the callback to all ranks or to none.
    start_from_epoch: epochs before this one do not count.

    Raises ArgumentError; in the fit, on all ranks, if the logs do not have `monitor`.
    """

    reads_batches = False

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        self._monitor = Monitor(monitor, mode, min_delta)
        require(integer(0).error("patience", patience), integer(0).error("start_from_epoch", start_from_epoch))
        require(FLAG.error("restore_best_weights", restore_best_weights))
        if baseline is not None and not is_number(baseline):
            raise ArgumentError(f"baseline must be a finite number, got {baseline!r}")
        self.monitor, self.patience, self.verbose = monitor, patience, verbose
        self.baseline, self.start_from_epoch = baseline, start_from_epoch
        self.restore_best_weights = restore_best_weights
        self.collective = self.reads_model = restore_best_weights
        self._begin()

    def _begin(self) -> None:
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best: float | None = None
        self._state: Arrays | None = None  # of the best epoch, as adopt.copy_state returns it

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._begin()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        value = self._monitor.value(logs)
        if epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self._state is None:  # there may never be an improvement: value is NaN
            self._copy_state(epoch)
        self.wait += 1
        if self._monitor.better(value, self.best):
            self.best = value
            if self.restore_best_weights and self.best_epoch != epoch:
                self._copy_state(epoch)
            self.best_epoch = epoch
            if self.baseline is None or self._monitor.better(value, self.baseline):
                self.wait = 0
            return
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self.stopped_epoch:
            self._say(f"epoch {self.stopped_epoch + 1}: early stopping, {self.monitor} has not improved")
        if self._state is not None:
            self._say(f"the model is that of the best epoch, {self.best_epoch + 1}")
            state, self._state = self._state, None
            adopt.load(self.trainer.strategy, state)

    def state(self) -> dict[str, Any]:
        best = {} if self.best is None else {"best": self.best}
        mine = self._state if self._state and self.trainer.rank == 0 else {}  # equal on other ranks
        kept = {f"kept.{name}": array for name, array in mine.items()}
        epochs = [self.wait, self.stopped_epoch, self.best_epoch]
        return {"epochs": epochs, "keeps": self._state is not None, **best, **kept}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.wait, self.stopped_epoch, self.best_epoch = state["epochs"].tolist()
        self.best = float(state["best"]) if "best" in state else None
        if self.restore_best_weights and state["keeps"]:
            kept = [name for name in state if name.startswith("kept.") and self.trainer.rank == 0]
            self._state = {name.removeprefix("kept."): state[name] for name in kept}
        if self.stopped_epoch and self.wait >= self.patience:
            self.trainer.stop_training = True  # the fit had ended

    def _copy_state(self, epoch: int) -> None:
        self._state, self.best_epoch = None, epoch  # free the previous copy first
        self._state = adopt.copy_state(self.trainer.strategy, on_all=self.trainer.goes_on)

    def _release(self) -> None:
        self._state = None


MODES = ("auto", "min", "max")
LARGER_IS_BETTER = ("acc", "auc", "fmeasure", "precision", "recall", "f1")  # the beginning of a metric's name


class Monitor:
    """Compares a metric of the logs with its best value. name: in the logs: "val_loss", ... mode: "min", "max", or
    "auto" (by the name).

    min_delta: a smaller or equal change is not an improvement. Raises ArgumentError.
    """

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        require(name_error("mode", mode, MODES))
        if not is_number(min_delta):
            raise ArgumentError(f"min_delta must be a finite number, got {min_delta!r}")
        self.name, self._min_delta = name, abs(float(min_delta))
        if mode == "auto":
            mode = "max" if name.removeprefix("val_").startswith(LARGER_IS_BETTER) else "min"
        self._larger = mode == "max"

    def value(self, logs: Logs | None) -> float:
        """Return the metric's value in `logs`. Raises ArgumentError if the logs do not have it."""
        logs = logs or {}
        if self.name not in logs:
            hint = "; pass validation_data to fit" if self.name.startswith("val_") else ""
            raise ArgumentError(f"monitor={self.name!r} is not measured here{hint}; the logs have {', '.join(logs)}")
        return float(logs[self.name])

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` is an improvement; the first number always is."""
        if than is None or math.isnan(value):
            return not math.isnan(value)
        return value - self._min_delta > than if self._larger else value + self._min_delta < than
