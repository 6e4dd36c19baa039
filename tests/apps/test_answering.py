"""A rank that is killed or stopped holds up nobody, and what it answers late is dropped."""

from pathlib import Path

from tests.conftest import JobRunner


def test_a_killed_and_a_stopped_rank(mpirun: JobRunner) -> None:
    job = mpirun(3, [Path(__file__).with_name("answering_job.py")], ulfm=True)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n"))[1:] == ["rank 0 ends", "rank 1 ends"], job.stdout + job.stderr
