"""Prints the progress of a fit on rank 0: a line per epoch, and on a terminal a bar."""

import sys
from typing import Any, TextIO

from allreduce.process.proc import on_terminal
from trainers.watching.callback import Callback, Logs
from trainers.watching.history import Epoch

BAR_DELAY = 0.5  # seconds; shorter epochs get their line and no bar


class Progress(Callback):
    """Prints the progress of a fit on rank 0.

    wanted: False for no output. steps: of an epoch; None if it is not known. stream: where lines are printed; None for
    stdout.
    """

    reads_batches = reads_model = False

    def __init__(self, wanted: bool, rank: int, steps: int | None, epochs: int, stream: TextIO | None = None) -> None:
        self._wanted = wanted
        self._set_output(rank)
        self._steps, self._epochs = steps, epochs
        self._stream = stream
        self._bar: Any = None

    def _set_output(self, rank: int) -> None:
        self._shown = self._wanted and rank == 0
        self._bars = self._shown and on_terminal()

    def on_ranks_change(self) -> None:
        self._set_output(self.trainer.rank)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._bars:
            from tqdm import tqdm

            label = f"epoch {epoch + 1}/{self._epochs}"
            self._bar = tqdm(
                total=self._steps, desc=label, unit="step", leave=False, delay=BAR_DELAY, ncols=80, file=sys.stderr
            )

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._bar is not None:
            self._bar.update(batch + 1 - self._bar.n)  # a rank may not compute every batch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.close()
        if self._shown:
            topology = self.trainer.topology  # ranks that share cores also wait for a core, so the shares say nothing
            line = Epoch.of_logs(epoch, logs or {}).line(shares=topology.sharing <= topology.cores)
            print(line, file=self._stream, flush=True)

    def print_line(self, text: str) -> None:
        if self._shown:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
