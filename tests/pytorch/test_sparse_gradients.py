"""Sparse gradients of PyTorch's embeddings: a job on three ranks, of which some have no rows."""

import importlib.util

import pytest

from tests.conftest import JobRunner


@pytest.mark.jobs
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this environment")
def test_embeddings_train_as_on_one_rank(mpirun: JobRunner) -> None:
    """MirroredOptimizer, all_reduce and DDP; see the program."""
    job = mpirun(3, ["-m", "tests.pytorch.sparse_gradients_job"], timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout == "done\n"
    told = "the sparse gradients of words.weight, rare.weight are averaged as dense ones"
    assert job.stderr.count(told) == 1
