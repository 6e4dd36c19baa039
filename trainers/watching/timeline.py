"""Timeline: what each rank does when, as a file for https://ui.perfetto.dev."""

import os

from allreduce.tracing.trace import MOST_SPANS, Trace
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Logs


class Timeline(Callback):
    """Writes a trace of the training when it ends: rows of data, compute, reductions, waits for others and updates.

    path: of the file, which rank 0 writes. most: spans that each rank keeps.

    Given on all ranks or on none. `python -m benchmarks.timeline FILE` says who waits for whom. A fit that ends in an
    error writes nothing. What is shown of a GPU is what the host spends on it.
    """

    collective = True
    reads_batches = False

    def __init__(self, path: str | os.PathLike[str], most: int = MOST_SPANS) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ArgumentError(f"most={most!r} is no number of spans")
        self.path, self.most = path, most
        self._trace: Trace | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.trainer._enter("Timeline begins")
        if self.trainer.trace is not None:
            raise ArgumentError(
                f"{self.path}: this fit is recorded already, in {self.trainer.trace.path}; give one Timeline"
            )
        self._trace = Trace(self.path, self.trainer.topology, self.most)
        self.trainer.record(self._trace)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.trainer._enter("Timeline ends")
        trace, self._trace = self._trace, None
        self.trainer.record(None)
        if trace is not None:
            trace.close()

    def set_trainer(self, trainer: object) -> None:
        if trainer is None and self._trace is not None:  # an error has ended the fit
            self.trainer.record(None)
            self._trace.abandon()
            self._trace = None
        super().set_trainer(trainer)
