"""What needs a GPU, on a stand-in for one: NCCL over MPI, and streams of which each access to memory is looked at."""

from pathlib import Path

from conftest import JobRunner


def test_on_three_ranks(mpirun: JobRunner) -> None:
    """See the program."""
    job = mpirun(3, [Path(__file__).parent / "cuda_job.py"], timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout == "done\n"
