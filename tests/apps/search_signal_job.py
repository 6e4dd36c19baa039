"""python -m trainers search, with a signal for one rank in the middle of a fit.

mpirun -n 4 python -m tests.apps.search_signal_job NAME RANK EPOCH FILE OPTION...

Rank RANK gets the signal NAME at the end of epoch EPOCH (from 0) of the first trial that trains so long there, unless
FILE exists, which is then written. The options are those of the command.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from trainers.apps.search import command
from trainers.cli.main import main
from trainers.watching.callback import Callback


class Sends(Callback):
    """Sends a signal to this rank at the end of an epoch, once in all jobs."""

    reads_batches = reads_model = False

    def __init__(self, number: signal.Signals, epoch: int, file: Path) -> None:
        self._number, self._epoch, self._file = number, epoch, file

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch and not self._file.exists():
            self._file.touch()
            os.kill(os.getpid(), self._number)


def run() -> int:
    name, rank, epoch, file, *options = sys.argv[1:]
    made = command.make_callbacks

    def with_signal(given: Any) -> list[Any]:
        mine = MPI.COMM_WORLD.rank == int(rank)
        return [*made(given), *[Sends(signal.Signals[name], int(epoch), Path(file))] * mine]

    command.make_callbacks = with_signal
    return main(["search", *options])


if __name__ == "__main__":
    sys.exit(run())
