"""Searches whose ranks get signals: mpirun -n N python -m tests.apps.search_job objective|command ARGUMENT..."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import allreduce  # prepares the environment of MPI, so it comes first

# isort: split
from mpi4py import MPI

from trainers.apps.search import command
from trainers.apps.search.searching import search
from trainers.apps.search.trial import Trial
from trainers.cli.main import main
from trainers.watching.callback import Callback

TRIALS, NOBODY = 6, "nobody"


def of_objective(journal: str, ranks_per_trial: str, who: str) -> None:
    """Search, and print the result as JSON on the first rank that is left.

    who: the ranks that die, such as "0,1", or "nobody". They die in the first trial from number 2 on that their part
        has, between two suggestions.
    """
    topology = allreduce.Topology.of_survivors()
    death = Path(f"{journal}.death")
    dies = str(topology.rank) in who.split(",")

    def objective(trial: Trial, part: allreduce.Topology) -> float:
        x = trial.suggest_float("x", -1, 1)
        if dies and trial.number >= 2:
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while trial.number >= 2 and who != NOBODY and not death.exists():  # else this part may take all trials
            time.sleep(0.01)
        return x * x + trial.suggest_int("k", 0, 1)

    result = search(objective, TRIALS, topology, int(ranks_per_trial), storage=journal)
    if result.topology.rank == 0:
        print(json.dumps({"trials": [each._asdict() for each in result.trials], "ranks": result.topology.size}))
    result.topology.close()


class Sends(Callback):
    """Sends a signal to this rank at the end of an epoch, once in all jobs."""

    reads_batches = reads_model = False

    def __init__(self, number: signal.Signals, epoch: int, file: Path) -> None:
        self._number, self._epoch, self._file = number, epoch, file

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch and not self._file.exists():
            self._file.touch()
            os.kill(os.getpid(), self._number)


def of_command(name: str, rank: str, epoch: str, file: str, *options: str) -> int:
    """Run python -m trainers search with these options.

    Rank `rank` gets the signal `name` at the end of epoch `epoch` (from 0) of the first trial that trains so long
    there, unless the file exists, which is then written.
    """
    made, mine = command.make_callbacks, MPI.COMM_WORLD.rank == int(rank)

    def with_signal(given: Any) -> list[Any]:
        return [*made(given), *[Sends(signal.Signals[name], int(epoch), Path(file))] * mine]

    command.make_callbacks = with_signal
    return main(["search", *options])


if __name__ == "__main__":
    sys.exit({"objective": of_objective, "command": of_command}[sys.argv[1]](*sys.argv[2:]))
