"""The evaluator: a rank that does not train, but evaluates each new checkpoint during the training."""

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI

from allreduce.transport.wait import Pause, wait_until, waiting
from trainers.cli.results import without_nan
from trainers.data import Arrays
from trainers.errors import CheckpointError, as_error
from trainers.files import checkpoint
from trainers.fit import evaluation
from trainers.replica import Replica
from trainers.watching.callback import writing

CHECK_SECONDS = 0.1  # between two polls of the folder
END = 1  # the tag of the message that says that the training has ended


class Evaluator:
    """Evaluates each new checkpoint in a folder. No MPI.

    replica: a replica of the trained model, into which each checkpoint is loaded.
    folder: where the checkpoints are; it need not exist yet.
    x, y: the data, arrays.
    output: a file that gets a line for each evaluation: JSON lines (.jsonl) or a table (.csv); None for none.
    append: append to that file, as for a resumed training.
    stream: where each evaluation is printed; None for stdout.

    Raises ArgumentError when the output can't be written.
    """

    def __init__(
        self,
        replica: Replica,
        folder: str,
        x: np.ndarray,
        y: np.ndarray,
        *,
        output: str | None = None,
        append: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._replica, self._folder = replica, folder
        self._rows = Arrays((x, y))
        self._stream = stream
        names = ["epoch", "step", *replica.metrics, "seconds", "checkpoint"]
        self._file = None if output is None else _Lines(output, names, append)
        self._seen = ""  # the newest path at the last poll
        self.evaluations: list[dict[str, Any]] = []

    def run(self, ended: Callable[[], bool]) -> list[dict[str, Any]]:
        """Evaluate each new checkpoint until `ended()`, and the last one; returns all evaluations, oldest first.

        Raises CheckpointError for checkpoints of another model, and the errors of the replica.
        """
        over = False
        while not over:
            over = ended()  # asked before the poll, so that the last checkpoint is not missed
            found = self._newest()
            if found is not None:
                self._evaluate(*found)
            elif not over:
                time.sleep(CHECK_SECONDS)
        return self.evaluations

    def _newest(self) -> tuple[str, checkpoint.Saved] | None:
        """Return the newest usable checkpoint; None if there is no new one since the last call."""
        with as_error(CheckpointError, f"the checkpoints in {self._folder} can't be read"):
            paths = checkpoint.paths(self._folder)
        if not paths or paths[0] == self._seen:
            return None
        self._seen = paths[0]
        found = checkpoint.newest(self._folder)
        if found is None or any(found[1].progress.total == each["step"] for each in self.evaluations[-1:]):
            return None
        self._seen = max(self._seen, found[0])  # a newer one may have been written meanwhile
        return found

    def _evaluate(self, path: str, saved: checkpoint.Saved) -> None:
        begin = time.perf_counter()
        kind = type(self._replica).__name__
        if saved.kind != kind:
            raise CheckpointError(f"{path} is of a {saved.kind}, and the evaluator has a {kind}")
        self._replica.load_state(saved.state)
        with np.errstate(all="ignore"):  # the loss shows it if the model has diverged
            if self._replica.average:  # as the trainer's own evaluation does
                self._replica.use_average()
            sums = evaluation.evaluate_rows(self._replica, self._rows).sum(axis=0)
        means = evaluation.means_of(self._replica.metrics, self._replica.counts, sums, len(self._rows))
        progress = saved.progress
        row = {"epoch": progress.epoch, "step": progress.total, **means, "seconds": time.perf_counter() - begin}
        self.evaluations.append({**row, "checkpoint": os.path.basename(path)})
        if self._file is not None:
            self._file.write(self.evaluations[-1])
        values = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        print(f"evaluator: {progress}  {values}", file=self._stream or sys.stdout, flush=True)


class _Lines:
    """Writes each evaluation to a file at once, as a line."""

    def __init__(self, path: str, names: list[str], append: bool) -> None:
        self._path, self._names = path, names
        self._ending = os.path.splitext(path)[1]
        with writing(path), open(path, "a" if append else "w", newline="") as file:
            if self._ending == ".csv" and not file.tell():
                csv.writer(file).writerow(names)

    def write(self, row: dict[str, Any]) -> None:
        with writing(self._path), open(self._path, "a", newline="") as file:
            if self._ending == ".csv":
                csv.writer(file).writerow([row[name] for name in self._names])
                return
            file.write(json.dumps(without_nan(row), allow_nan=False) + "\n")


@contextmanager
def end_signal(comm: MPI.Intracomm, chief: int, evaluator: int) -> Iterator[Callable[[], bool]]:
    """Context manager: when the chief leaves its block, also by an error, it sends the evaluator the message that the
    training has ended. Yields a function that tells the evaluator whether it has come. Local. The evaluator leaves its
    block after that, so an error of its own is raised only after the end of the training.

    comm: a communicator of all ranks, used for nothing else. chief, evaluator: ranks in it.
    """
    message = np.empty(0, np.uint8)
    request = comm.Irecv(message, chief, END) if comm.rank == evaluator else MPI.REQUEST_NULL
    try:
        yield request.Test
    finally:
        if comm.rank == chief:
            with waiting(comm, "notify the evaluator that the training has ended"):
                comm.Send(message, evaluator, END)
        wait_until(request.Test, pause=Pause(longest=CHECK_SECONDS))  # of other ranks: a null request, which has ended
