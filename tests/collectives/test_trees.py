"""Trees of arrays in the place of one."""

import launch
from conftest import JobRunner


def test_trees(mpirun: JobRunner) -> None:
    """All that tests/trees_job.py asserts, on three ranks."""
    job = mpirun(3, [launch.ROOT / "tests" / "trees_job.py"], timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
