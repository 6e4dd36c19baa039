"""One rank of trainings whose replicas differ after a failure, and are then overwritten with the replica of `source`.

    mpirun --with-ft ulfm -n 4 python -m tests.faults.moments.sources KIND SOURCE DIES

KIND: "trainer", "optimizer". Of four ranks, rank DIES is killed. Later each rank writes its rank in the job into a
parameter, once. Each rank prints the rank whose parameter all have at the end.
"""

import json
import sys
from typing import Any

from allreduce import Topology
from allreduce.errors import RankLostError
from allreduce.transport import processes
from tests.faults.moments.training import BATCH, data, network
from tests.faults.points import die
from trainers import MirroredTrainer
from trainers.callbacks import Callback, CheckDivergence

EPOCHS = 5


class Parting(Callback):
    """Kills a rank in epoch 2, makes the replicas differ in epoch 4, and notes which replica was copied."""

    def __init__(self, dies: int) -> None:
        self.dies, self.left = dies, -1.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, 1) and processes.here()[0] == self.dies:
            die()
        if (self.epoch, batch) == (3, 1):
            self.trainer.replica.learning_rates = [0.0]  # what the ranks copy stays as it is
            self.trainer.replica.parameters[-1] = processes.here()[0]

    def between_steps(self, epoch: int, batch: int) -> None:
        if (epoch, batch) == (3, 1):
            self.left = float(self.trainer.replica.parameters[-1])


def trained(source: int, dies: int) -> dict[str, Any]:
    ranks = Topology()
    parting = Parting(dies)
    check = CheckDivergence(every=1, on_divergence="copy", source=source)
    with MirroredTrainer(network(0), topology=ranks, on_failure="continue") as trainer:
        trainer.fit(*data(), EPOCHS, BATCH, callbacks=[check, parting], progress=False)
        return {"left": parting.left, "copies": check.copies, "ranks": trainer.size}


def optimized(source: int, dies: int) -> dict[str, Any]:
    import tests.without_dynamo  # noqa: F401

    # isort: split
    import torch

    from trainers.pytorch import MirroredOptimizer

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = MirroredOptimizer(plain, model, transforms=[CheckDivergence(1, "copy", source)])
    for step in range(4):
        if step == 1 and processes.here()[0] == dies:
            die()
        try:
            model(torch.ones(2, 3)).sum().backward()
            if step == 2:
                with torch.no_grad():
                    model.bias[0] = processes.here()[0]
            optimizer.step()
        except RankLostError:
            continue
    return {"left": model.bias.item(), "ranks": optimizer.topology.size}


def main(kind: str, source: str, dies: str) -> None:
    came = (optimized if kind == "optimizer" else trained)(int(source), int(dies))
    came["number"] = processes.here()[0]
    print(json.dumps(came), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
