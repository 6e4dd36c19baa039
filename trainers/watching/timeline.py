"""Timeline: writes a trace of the activities of each rank to a file for https://ui.perfetto.dev."""

import os

from allreduce.tracing.trace import MOST_SPANS, Trace
from allreduce.transport.control import all_values
from trainers.arguments import integer, require
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Logs


class Timeline(Callback):
    """Records a trace of the fit and writes it at the end: spans of data, compute, reductions, waits and updates.

    path: the file, which rank 0 writes. most: the largest number of spans per rank.

    Given on all ranks or on none. `python -m benchmarks.timeline FILE` shows which ranks wait for which. A fit that
    ends in an error writes nothing, and the spans of a failed rank are missing. For a GPU the trace shows
    the host's time.
    """

    collective = True
    reads_batches = False

    def __init__(self, path: str | os.PathLike[str], most: int = MOST_SPANS) -> None:
        require(integer(1).error("most", most))
        self.path, self.most = path, most
        self._trace: Trace | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.trainer.group.enter("Timeline begins")
        self._release()
        if self.trainer.trace is not None:
            raise ArgumentError(
                f"{self.path}: this fit is already recorded in {self.trainer.trace.path}; use one Timeline"
            )
        self._trace = Trace(self.path, self.trainer.topology, self.most)
        self.trainer.record(self._trace)

    def on_ranks_change(self) -> None:
        if self._trace is not None:
            self.trainer.record(self._trace)  # connect the new backend to the trace

    def on_train_end(self, logs: Logs | None = None) -> None:
        trainer, trace = self.trainer, self._trace
        trainer.group.enter("Timeline ends")
        if not all(all_values(trainer.group.comm, trace is not None and not trace.closed, "write a trace")):
            self._release()  # a rank failed while the trace was collected
            return
        assert trace is not None
        trainer.record(None)
        if trace.topology is not trainer.topology:
            trace.move(trainer.topology)
        trace.close()
        self._trace = None

    def _release(self) -> None:
        """Drop a trace that was not written, because an error ended the fit."""
        if self._trace is not None:
            self.trainer.record(None)
            self._trace.abandon()
            self._trace = None
