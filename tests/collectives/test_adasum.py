"""The backend "adasum", on a power of two of ranks and not."""

import pytest

from tests.conftest import JobRunner


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [3, 4])
def test_adasum(mpirun: JobRunner, ranks: int) -> None:
    job = mpirun(ranks, ["-m", "tests.collectives.adasum_job"], timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(ranks)]
