"""ModelCheckpoint: writes the model after each epoch, or after each epoch that was better than all before."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Logs
from trainers.watching.early_stopping import Monitor, is_number


class ModelCheckpoint(Callback):
    """Saves the model by `trainer.save` at the end of epochs. Given on all ranks or on none. Keras' arguments.

    filepath: of the file; it may name the epoch, which counts from 1, and what was measured:
        "run/{epoch:02d}-{val_loss:.3f}.npz". Without that, the file is replaced each time.
    monitor, mode: the metric that must improve with save_best_only. initial_value_threshold: on what it must improve at
        first.
    verbose: 1 to say on rank 0 what was saved.
    save_best_only: only when `monitor` is better than ever before.
    save_freq: "epoch". To go on after a crash, and every so many steps or seconds, there are checkpoints of a fit.

    Raises ArgumentError on all ranks: before the training when the folder can't be written or the name asks for what
    is not measured, after the first epoch otherwise; ModelFileError when a file can't be written.
    """

    collective = True
    reads_batches = False

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        if save_freq != "epoch":
            raise ArgumentError(f'save_freq={save_freq!r}: models are saved at the end of epochs, save_freq="epoch"')
        if initial_value_threshold is not None and not is_number(initial_value_threshold):
            raise ArgumentError(f"initial_value_threshold={initial_value_threshold!r} is no number")
        self.filepath, self.verbose, self.save_best_only = os.fspath(filepath), verbose, save_best_only
        self._monitor = Monitor(monitor, mode)
        self.best = initial_value_threshold

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.trainer.group.enter("ModelCheckpoint begins")
        self.trainer.group.on_one(self._check_folder)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.save_best_only:
            value = self._monitor.value(logs)
            if not self._monitor.better(value, self.best):
                return
            self.best = value
        path = self._path(epoch, logs or {})
        self.trainer.save(path)
        self._say(f"epoch {epoch + 1}: saved {path}")

    def state(self) -> dict[str, Any]:
        return {} if self.best is None else {"best": self.best}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.best = float(state["best"])

    def _path(self, epoch: int, logs: Logs) -> str:
        try:
            return self.filepath.format(**{**logs, "epoch": epoch + 1})
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            known = ", ".join(["epoch", *logs])
            text = f"filepath={self.filepath!r} can't be filled in ({error!r}); there are: {known}"
            raise ArgumentError(text) from error

    def _check_folder(self) -> None:
        folder = os.path.dirname(os.path.abspath(self.filepath))
        if "{" in folder:  # known when something was measured
            return
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ArgumentError(f"filepath={self.filepath!r}: {folder} is no folder that can be written; make it first")
