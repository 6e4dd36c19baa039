"""Exact: one SHA-256 on any number of ranks, also when ranks are killed."""

import json
from typing import Any

import pytest

from tests.conftest import JobRunner

pytestmark = pytest.mark.jobs


def trained(mpirun: JobRunner, ranks: int, *arguments: str, **options: Any) -> list[list[Any]]:
    """Return, for each training, the number of remaining ranks, the distinct SHA-256, and the losses."""
    job = mpirun(ranks, ["-m", "tests.elastic.exact_job", *arguments], timeout=120, **options)
    assert job.returncode == 0, job.stdout + job.stderr
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("[")]


def test_one_sha256_on_any_ranks_and_after_killed_ones(mpirun: JobRunner) -> None:
    """The trainings on 1, 3 and 5 ranks are sharded."""
    came = trained(mpirun, 5)
    _, digests, losses = came[0]
    assert len(digests) == 1
    assert sorted(came) == [[ranks, digests, losses] for ranks in range(1, 6)]
    for copies in ("1", "2"):  # replicated; slices with a backup
        assert trained(mpirun, 4, copies, '{"1 2": 2, "3 0": 0}', ulfm=True) == [[2, digests, losses]]
