"""The backend "adasum", on a power of two of ranks and not."""

import launch
import pytest
from conftest import JobRunner


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [3, 4])
def test_adasum(mpirun: JobRunner, ranks: int) -> None:
    job = mpirun(ranks, [launch.ROOT / "tests" / "adasum_job.py"], timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(ranks)]
