"""Exact: one SHA-256 on any number of ranks, also when ranks are killed."""

import json
from typing import Any

import pytest

from tests.conftest import JobRunner

pytestmark = pytest.mark.jobs


def trained(mpirun: JobRunner, ranks: int, update: str, copies: int = 1, **dies: int) -> list[Any]:
    """Return the number of remaining ranks, the distinct SHA-256, and the losses."""
    when = {key.replace("_", " ").strip(): rank for key, rank in dies.items()}
    args = ["-m", "tests.elastic.exact_job", update, str(copies), json.dumps(when)]
    job = mpirun(ranks, args, ulfm=bool(dies), timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    return json.loads(job.stdout.splitlines()[-1])


def test_one_sha256_on_any_ranks_and_after_killed_ones(mpirun: JobRunner) -> None:
    _, digests, losses = trained(mpirun, 1, "replicated")
    assert len(digests) == 1
    for ranks in (2, 3, 4, 5):
        assert trained(mpirun, ranks, "sharded" if ranks % 2 else "replicated") == [ranks, digests, losses]
    assert trained(mpirun, 4, "replicated", 1, _1_2=2, _3_0=0) == [2, digests, losses]
    assert trained(mpirun, 4, "sharded", 2, _1_2=2, _3_0=0) == [2, digests, losses]
