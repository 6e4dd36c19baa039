"""What travels as 16 bits, in every backend, trainers and MirroredOptimizer."""

import launch
from conftest import JobRunner


def test_compressed(mpirun: JobRunner) -> None:
    job = mpirun(2, [launch.ROOT / "tests" / "compressed_job.py"], timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(2)]
