"""Trees of arrays in the place of one."""

from tests.conftest import JobRunner


def test_trees(mpirun: JobRunner) -> None:
    """All that trees_job.py asserts, on three ranks."""
    job = mpirun(3, ["-m", "tests.collectives.trees_job"], timeout=60)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
