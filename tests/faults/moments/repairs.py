"""One rank of a job in which a worker kills itself, and another one when the remaining ranks meet to recover.

    mpirun --with-ft ulfm -n 5 python -m tests.faults.moments.repairs central

The rank that is 0 at the end prints the result of the training, and that of one rank alone, as lines of JSON.
"""

import sys
from typing import Any
from unittest import mock

from mpi4py import MPI

from tests.faults.moments.served import alone, trained
from tests.faults.points import die
from trainers import CentralStorageTrainer, ParameterServerTrainer
from trainers.recovery.recovery import Recovery

OWNER = 3
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "central": (CentralStorageTrainer, {"storage": OWNER}),
    "sync": (ParameterServerTrainer, {"servers": [OWNER], "updates": "sync"}),
    "async": (ParameterServerTrainer, {"servers": [OWNER]}),
}

if __name__ == "__main__":
    make, options = KINDS[sys.argv[1]]
    if MPI.COMM_WORLD.rank == 1:
        mock.patch.object(Recovery, "_meet", side_effect=die).start()
    trained(sys.argv[1], make, {0: ("part", 1, 0)}, **options)
    if MPI.COMM_WORLD.Shrink().rank == 0:
        alone()
