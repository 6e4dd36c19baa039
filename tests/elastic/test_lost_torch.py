"""A failed rank under PyTorch, in jobs of Open MPI with ULFM: MirroredOptimizer survives it, DDP raises an error."""

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import Topology
from tests.conftest import JobRunner
from tests.faults import job_of


def test_slices_that_were_copied_again_are_kept_twice_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the slices of the overwritten replica would come back at the next failure."""
    torch = pytest.importorskip("torch")
    from trainers import checks
    from trainers.callbacks import CheckDivergence
    from trainers.pytorch import MirroredOptimizer
    from trainers.pytorch.sharded import PARAMETER
    from trainers.state.backup import Backup

    class Found:
        root, differing = staticmethod(lambda: 0), staticmethod(lambda root: [1])

    def overwrite(comm: MPI.Intracomm, tensors: Any, root: int) -> None:
        for each in tensors:
            each.data.fill_(7.0)

    monkeypatch.setattr(checks, "compare", lambda *_: Found())
    monkeypatch.setattr("trainers.pytorch.owners.broadcast_tensors", overwrite)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"update": "sharded", "transforms": [CheckDivergence(1, "copy")]}
    with (
        Topology(MPI.COMM_SELF) as topology,
        MirroredOptimizer(plain, model, topology=topology, **options) as optimizer,
    ):
        sharded = optimizer._parts.owners
        sharded.shards.backup = Backup(sharded.reducer.comm, 0, [[0, sharded._held[-1].stop]])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        steps, state = sharded.backed_up(topology.world)
        assert steps == 1
        assert all((each[PARAMETER] == 7).all() for each in state)


@pytest.mark.jobs
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this environment")
def test_a_batch_that_is_computed_again_counts_once_in_batch_norm(mpirun: JobRunner) -> None:
    job = mpirun(4, [*job_of("batch_norm")], ulfm=True, timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    came = {each["name"]: each for each in map(json.loads, job.stdout.splitlines())}
    for name, ranks in (("sharded", 3), ("mirrored", 2), ("central", 1)):
        assert (came[name]["ranks"], came[name]["batches"]) == (ranks, 15)
        np.testing.assert_allclose(came[name]["mean"], came["alone"]["mean"], rtol=1e-4, atol=1e-6)


@pytest.mark.jobs
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this environment")
def test_torch_distributed_tells_of_a_lost_rank(mpirun: JobRunner) -> None:
    """All later operations raise. DDP, which waits for futures in C++, raises too, and does not crash."""
    job = mpirun(3, [*job_of("lost_distributed")], ulfm=True, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    assert sum(line.startswith("disagreement: ") and "DisagreementError: the ranks" in line for line in lines) == 3
    for name in ("backward", "all_reduce", "wait", "recv"):
        assert sum(line.startswith(f"{name}: ") and "RankLostError: " in line for line in lines) == 2, job.stdout
