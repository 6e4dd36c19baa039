"""A few random sequences of calls on backends; `python -m tests.sequences` runs them for hours."""

import json

import pytest

from tests.conftest import JobRunner


@pytest.mark.jobs
def test_the_features_of_backends_composed(mpirun: JobRunner) -> None:
    job = mpirun(3, ["-m", "tests.sequences", "--seed", "7", "--sequences", "12"], timeout=200)
    assert job.returncode == 0, job.stdout + job.stderr
    total = json.loads(job.stdout.splitlines()[-1])
    assert (total["sequences"], total["failed"]) == (12, 0)
