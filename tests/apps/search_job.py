"""A search whose ranks are killed: mpirun -n 2 python -m tests.apps.search_job JOURNAL RANKS_PER_TRIAL WHO.

WHO: the ranks that die, such as "0,1", or "nobody". They die in the first trial from number 2 on that their part has,
between two suggestions. The program prints the result as JSON on the first rank that is left.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import allreduce
from trainers.apps.search.searching import search
from trainers.apps.search.trial import Trial

TRIALS, NOBODY = 6, "nobody"


def main() -> None:
    journal, ranks_per_trial, who = sys.argv[1:]
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


if __name__ == "__main__":
    main()
