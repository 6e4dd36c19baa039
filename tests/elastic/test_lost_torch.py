"""A failed rank under PyTorch, in jobs of Open MPI with ULFM: MirroredOptimizer survives it, DDP raises an error."""

import importlib.util
import json

import numpy as np
import pytest

from tests.conftest import JobRunner

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this environment"
    ),
]


# Rank 1 dies after the others have computed a batch, so that its step is never taken. Batch norm is the first layer, so
# its running mean does not depend on how the rows are divided.
BATCH_NORM = """
import json
import tests.without_dynamo
import torch
from mpi4py import MPI
from allreduce import Topology
from tests.faults import points
from tests.faults.moments.training import BATCH, Deaths, data
from trainers import CentralStorageTrainer, MirroredTrainer, Sharded
from trainers.replicas.pytorch import TorchReplica

class Dying(Deaths):
    def _come(self, event, batch=0):
        if (event, self.epoch, batch) == self.moment:
            points.at("update", points.die, after=True)  # with copies of slices

def trained(name, kind, ranks, dies, **options):
    torch.manual_seed(7)
    norm = torch.nn.BatchNorm1d(8)
    module = torch.nn.Sequential(norm, torch.nn.Linear(8, 3))
    replica = TorchReplica(module, torch.nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
    with kind(replica, topology=ranks, **options) as trainer:
        deaths = Dying if "update" in options else Deaths
        callbacks = [deaths(("batch_begin", 1, 2) if dies else None)]
        trainer.fit(*data(), 3, BATCH, callbacks=callbacks, progress=False)
        mean, batches = norm.running_mean.tolist(), int(norm.num_batches_tracked)
        if trainer.rank == 0:
            print(json.dumps({"name": name, "mean": mean, "batches": batches, "ranks": trainer.size}), flush=True)

for name, kind, options in (
    ("sharded", MirroredTrainer, {"update": Sharded(copies=2)}),
    ("mirrored", MirroredTrainer, {}),
    ("central", CentralStorageTrainer, {}),
):
    with Topology.of_survivors() as ranks:
        trained(name, kind, ranks, ranks.rank == 1, on_failure="continue", **options)
trained("alone", MirroredTrainer, Topology(MPI.COMM_SELF), False)
"""


def test_a_batch_that_is_computed_again_counts_once_in_batch_norm(mpirun: JobRunner) -> None:
    job = mpirun(4, ["-c", BATCH_NORM], ulfm=True, timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    came = {each["name"]: each for each in map(json.loads, job.stdout.splitlines())}
    for name, ranks in (("sharded", 3), ("mirrored", 2), ("central", 1)):
        assert (came[name]["ranks"], came[name]["batches"]) == (ranks, 15)
        np.testing.assert_allclose(came[name]["mean"], came["alone"]["mean"], rtol=1e-4, atol=1e-6)


# DDP makes its buckets anew in the second step, which broadcasts.
LOST = """
import tests.without_dynamo
import torch
import torch.distributed as dist
from torch import nn
import allreduce.torch_backend
from tests.faults.points import die

def say_what_is_raised(name, call):
    try:
        call()
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    print(f"{name}: {text.splitlines()[0]}", flush=True)

torch.set_num_threads(1)
dist.init_process_group("allreduce")
data, rank = torch.ones(4), dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
for _ in range(3):
    model(torch.ones(5, 3)).sum().backward()
receiving = dist.irecv(data.clone(), (rank + 1) % 3)
if rank == 1:
    die()
say_what_is_raised("backward", model(torch.ones(5, 3)).sum().backward)
say_what_is_raised("all_reduce", lambda: dist.all_reduce(data))
say_what_is_raised("wait", receiving.wait)
say_what_is_raised("recv", lambda: dist.recv(data, 2 - rank))
say_what_is_raised("monitored_barrier", dist.group.WORLD.monitored_barrier)
dist.destroy_process_group()
"""


def test_torch_distributed_tells_of_a_lost_rank(mpirun: JobRunner) -> None:
    """All later operations raise. DDP, which waits for futures in C++, raises too, and does not crash."""
    job = mpirun(3, ["-c", LOST], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    for name in ("backward", "all_reduce", "wait", "recv", "monitored_barrier"):
        assert sum(line.startswith(f"{name}: ") and "RankLostError: " in line for line in lines) == 2, job.stdout
