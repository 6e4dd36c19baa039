"""TensorBoard: event files of a training, written by rank 0."""

import numbers
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.arguments import is_integer
from trainers.errors import ArgumentError, needing
from trainers.watching.callback import FileCallback, Logs, writing
from trainers.watching.history import VALIDATION


class TensorBoard(FileCallback):
    """Shows the training in TensorBoard: `tensorboard --logdir logs`. Only rank 0 writes; of the epoch at whose end it
    fails, the numbers may be missing.

    log_dir: gets the folders "train" and, with validation data, "validation", as Keras writes them.
    update_freq: "epoch"; "batch", or a number of steps, to write loss and metrics of batches too, for which the host
        waits for a GPU.

    By epoch: epoch_loss and the other metrics, epoch_learning_rate, epoch_samples_per_second,
    epoch_communication_share, epoch_seconds, and all other logs of the trainer that are numbers. By batch:
    batch_loss, ... Raises ArgumentError on all ranks if tensorboardX is missing (the extra "tensorboard"), or if the
    folder can't be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str] = "logs", update_freq: str | int = "epoch") -> None:
        named = {"epoch": 0, "batch": 1}
        every = named.get(update_freq, -1) if isinstance(update_freq, str) else update_freq
        if not is_integer(every, 0 if update_freq == "epoch" else 1):
            raise ArgumentError(f'update_freq={update_freq!r}: use "epoch", "batch", or a number of steps')
        self.log_dir, self._every = os.fspath(log_dir), every
        self.reads_batches = every > 0
        self._writers: dict[str, EventFile] = {}
        self._step = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._step = 0
        if self.trainer.goes_on:
            _package()  # imports it now: that takes seconds, which the others would wait if this became rank 0 later
        super().on_train_begin(logs)

    def _open(self, append: bool) -> None:
        self._writers = {"train": EventFile(os.path.join(self.log_dir, "train"))}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._step += 1
        if self._writes and self._every and self._step % self._every == 0:
            self._writers["train"].write({f"batch_{name}": value for name, value in (logs or {}).items()}, self._step)

    def _write_epoch(self, epoch: int, logs: Logs) -> None:
        trained: dict[str, Any] = {}
        validated: dict[str, Any] = {}
        for name, value in logs.items():
            values = validated if name.startswith(VALIDATION) else trained
            values[f"epoch_{name.removeprefix(VALIDATION)}"] = value
        for rate in self.trainer.replica.learning_rates[:1]:
            trained["epoch_learning_rate"] = rate
        self._writers["train"].write(trained, epoch)
        if validated:
            if "validation" not in self._writers:
                self._writers["validation"] = EventFile(os.path.join(self.log_dir, "validation"))
            self._writers["validation"].write(validated, epoch)
        for writer in self._writers.values():
            writer.flush()

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._step = int(state["step"])

    def _close(self) -> None:
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()


class EventFile:
    """Writes an event file in `folder`, which is created. Raises ArgumentError."""

    def __init__(self, folder: str) -> None:
        self._summary, self._event, writer = _package()
        self._folder = folder
        with writing(folder):
            os.makedirs(folder, exist_ok=True)
            self._writer = writer(os.path.join(folder, "events"), f".{os.getpid()}.{time.time_ns()}")

    def write(self, values: Mapping[str, Any], step: int) -> None:
        """Write the values that are numbers."""
        for tag, value in values.items():
            if isinstance(value, numbers.Real):
                event = self._event(wall_time=time.time(), step=step, summary=self._summary.scalar(tag, float(value)))
                with writing(self._folder):
                    self._writer.write_event(event)

    def flush(self) -> None:
        with writing(self._folder):
            self._writer.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def _package() -> tuple[Any, Any, Any]:
    """The parts of tensorboardX that are used. Raises ArgumentError."""
    with needing('TensorBoard needs tensorboardX ({}): pip install ".[tensorboard]" in the checkout'):
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
    return summary, Event, EventsWriter
