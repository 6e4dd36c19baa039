"""A few random sequences of calls on trainers, and the defects that longer runs have found; tests/sequences runs them
for hours."""

import json

import pytest

from tests.conftest import JobRunner


@pytest.mark.jobs
def test_sequences_of_calls(mpirun: JobRunner) -> None:
    options = ["found", "--no-torch", "--seed", "7", "--sequences", "3"]
    job = mpirun(3, ["-m", "tests.sequences", *options], timeout=200, ulfm=True)
    assert job.returncode == 0, job.stdout + job.stderr
    *found, total = job.stdout.splitlines()
    assert len(found) == 9
    assert json.loads(total)["sequences"] == 3
    assert json.loads(total)["failed"] == 0


@pytest.mark.jobs
def test_the_features_of_backends_composed(mpirun: JobRunner) -> None:
    job = mpirun(3, ["-m", "tests.sequences", "composition", "--seed", "7", "--sequences", "12"], timeout=200)
    assert job.returncode == 0, job.stdout + job.stderr
    total = json.loads(job.stdout.splitlines()[-1])
    assert (total["sequences"], total["failed"]) == (12, 0)
