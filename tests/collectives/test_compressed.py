"""What travels as 16 bits, in every backend, trainers and MirroredOptimizer."""

from tests.conftest import JobRunner


def test_compressed(mpirun: JobRunner) -> None:
    job = mpirun(2, ["-m", "tests.collectives.compressed_job"], timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(2)]
