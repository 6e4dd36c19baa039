"""One rank of a training in which ranks kill themselves, and standby ranks replace them.

    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.joining mirrored
    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.joining local
    mpirun --with-ft ulfm -n 6 python -m tests.faults.moments.joining central FOLDER

Three ranks work and three stand by. Two of these are needed; the last one is released, or has failed before. Each rank
prints its result.
"""

import json
import sys
from typing import Any

from allreduce import Topology
from allreduce.elastic import standby
from tests.faults.moments.training import Deaths, trained
from tests.faults.points import die
from trainers import CentralStorageTrainer, Checkpoint, LocalSGD

WORKING = 3


def main(kind: str, folder: str = "") -> None:
    """central: the storage rank dies first, so all ranks go back to a checkpoint in the middle of an epoch. central and
    local: with a loader."""
    given: dict[str, Any] = {"options": {}}
    if kind == "central":
        given = {
            "options": {"storage": 1},
            "kind": CentralStorageTrainer,
            "checkpoint": Checkpoint(folder, "7 steps"),
            "rows": "whole",
        }
    if kind == "local":
        given = {"options": {"average": LocalSGD(4, outer="diloco")}, "rows": "whole"}
    pool = Topology()
    moments = {1: ("batch_begin", 1, 2), 0: ("epoch_end", 3, 0)}
    deaths = Deaths(moments.get(pool.rank))
    if kind == "mirrored" and pool.rank == 5:  # while the others form the ranks that work
        die()
    ranks = standby.elastic_world(pool, pool.size - WORKING)
    if ranks is None:
        print("not needed", flush=True)
        return
    print(json.dumps(trained(ranks, deaths=deaths, **given)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
