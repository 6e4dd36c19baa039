"""A failed rank under PyTorch, in jobs of Open MPI with ULFM: MirroredOptimizer survives it, DDP raises an error."""

import importlib.util
import json

import numpy as np
import pytest

from tests.conftest import JobRunner
from tests.faults import job_of


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
    for name in ("backward", "all_reduce", "wait", "recv", "monitored_barrier"):
        assert sum(line.startswith(f"{name}: ") and "RankLostError: " in line for line in lines) == 2, job.stdout
