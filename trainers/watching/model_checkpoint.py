"""ModelCheckpoint: writes the model after each epoch, or after each epoch that was better than all before."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.arguments import is_number
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Logs
from trainers.watching.early_stopping import Monitor


class ModelCheckpoint(Callback):
    """Saves the model by `trainer.save` at the end of epochs. Given on all ranks or on none. Keras' arguments.

    filepath: the file. It may contain the epoch, which counts from 1, and the logs:
        "run/{epoch:02d}-{val_loss:.3f}.npz". Otherwise the file is replaced each time.
    monitor, mode: the metric that must improve, with save_best_only. initial_value_threshold: the value that the first
        saved epoch must improve on.
    verbose: 1 to print the path of each saved model on rank 0.
    save_best_only: save only if `monitor` is better than in all epochs before.
    save_freq: "epoch". To resume after a crash, or to save every N steps or seconds, use fit(checkpoint=...).

    Raises ArgumentError on all ranks: before the training if the folder can't be written, after an epoch if the logs
    lack `monitor` or a name in `filepath`. Raises ModelFileError if a file can't be written.
    """

    collective = True
    reads_batches = reads_model = False  # trainer.save averages the parameters

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
            raise ArgumentError(f"initial_value_threshold={initial_value_threshold!r} is not a finite number")
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
            names = ", ".join(["epoch", *logs])
            text = f"filepath={self.filepath!r} can't be filled in ({error!r}); the known names are {names}"
            raise ArgumentError(text) from error

    def _check_folder(self) -> None:
        folder = os.path.dirname(os.path.abspath(self.filepath))
        if "{" in folder:  # not known before the first epoch
            return
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ArgumentError(f"filepath={self.filepath!r}: {folder} is not a writable folder; create it first")
