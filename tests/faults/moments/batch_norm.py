"""One rank of a job in which ranks die after the others have computed a batch, so that its step is never taken.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.batch_norm

Batch norm is the first layer, so its running mean does not depend on how the rows are divided. The rank that is 0 at
the end prints, for each training and for one rank alone, the running mean and the number of batches that it counted.
"""

import json
from typing import Any

import tests.without_dynamo  # noqa: F401

# isort: split
import torch
from mpi4py import MPI

from allreduce import Topology
from tests.faults import points
from tests.faults.moments.training import BATCH, Deaths, data
from trainers import CentralStorageTrainer, MirroredTrainer, Sharded
from trainers.replicas.pytorch import TorchReplica

EPOCHS = 3


class Dying(Deaths):
    """Makes this rank die at a moment, in the update of the parameters."""

    def _come(self, event: str, batch: int = 0) -> None:
        if (event, self.epoch, batch) == self.moment:
            points.at("update", points.die, after=True)


def trained(name: str, kind: Any, ranks: Topology, moment: tuple[str, int, int] | None, **options: Any) -> None:
    """moment: of this rank's death; with backups of slices, in the update of the shared memory."""
    torch.manual_seed(7)
    norm = torch.nn.BatchNorm1d(8)
    module = torch.nn.Sequential(norm, torch.nn.Linear(8, 3))
    replica = TorchReplica(module, torch.nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
    with kind(replica, topology=ranks, **options) as trainer:
        twice = moment is not None and "update" in options
        callbacks = [Dying(moment) if twice else Deaths(moment)]
        trainer.fit(*data(), EPOCHS, BATCH, callbacks=callbacks, progress=False)
        mean, batches = norm.running_mean.tolist(), int(norm.num_batches_tracked)
        if trainer.rank == 0:
            print(json.dumps({"name": name, "mean": mean, "batches": batches, "ranks": trainer.size}), flush=True)


def main() -> None:
    with Topology.of_survivors() as ranks:
        moment = ("batch_begin", 1, 2) if ranks.rank == 1 else None
        trained("sharded", MirroredTrainer, ranks, moment, update=Sharded(copies=2), on_failure="continue")
    with Topology.of_survivors() as ranks:
        moment = ("batch_begin", 1, 2) if ranks.rank == 1 else None
        trained("mirrored", MirroredTrainer, ranks, moment, on_failure="continue")
    with Topology.of_survivors() as ranks:
        moment = ("batch_begin", 1, 2) if ranks.rank == 1 else None
        trained("central", CentralStorageTrainer, ranks, moment, on_failure="continue")
    trained("alone", MirroredTrainer, Topology(MPI.COMM_SELF), None)


if __name__ == "__main__":
    main()
