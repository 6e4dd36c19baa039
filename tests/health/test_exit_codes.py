"""The exit code of a job, for each way in which it can end: scripts that restart jobs depend on it."""

import re
import subprocess

import pytest

from tests.conftest import JobRunner
from tests.faults import job_of

KILLED = 128 + 9
WAYS = {"end": 0, "raise": 1, "interrupt": 130, "exit": 5}


def run(
    mpirun: JobRunner, kind: str, ranks: int, living: int, way: str, mpi: str, ulfm: bool
) -> "subprocess.CompletedProcess[str]":
    env = {"ALLREDUCE_TIMEOUT_SECONDS": "60"}  # shorter than the job's: a rank that waits for ever gives another code
    return mpirun(ranks, [*job_of("ends"), kind, str(living), way], mpi=mpi, ulfm=ulfm, timeout=150, env=env)


@pytest.mark.parametrize(
    ("mpi", "ulfm", "way"),
    [
        ("openmpi", False, "interrupt"),
        ("mpich", False, "exit"),
        *[("openmpi", True, way) for way in ("end", "raise")],
    ],
)
def test_of_a_job_whose_ranks_all_live(mpirun: JobRunner, mpi: str, ulfm: bool, way: str) -> None:
    """test_abort.py raises an exception without ULFM, and in test_waits.py a rank of Open MPI calls sys.exit."""
    assert run(mpirun, "allreduce", 2, 2, way, mpi, ulfm).returncode == WAYS[way]


@pytest.mark.parametrize(("mpi", "code"), [("openmpi", KILLED), ("mpich", 9)])
def test_of_a_job_without_ulfm_that_loses_a_rank(mpirun: JobRunner, mpi: str, code: int) -> None:
    assert run(mpirun, "allreduce", 2, 1, "meet", mpi, ulfm=False).returncode == code


@pytest.mark.parametrize(
    ("kind", "ranks", "living", "way"),
    [
        ("allreduce", 3, 2, "meet"),
        *[("allreduce", 2, 1, way) for way in ("meet", "end", "interrupt", "exit")],
        ("allreduce", 3, 2, "exit"),
        *[(kind, 3, 2, "meet") for kind in ("torch", "ParameterServerTrainer")],
        ("horovod", 3, 1, "meet"),
    ],
)
def test_of_a_job_with_ulfm_that_loses_ranks(mpirun: JobRunner, kind: str, ranks: int, living: int, way: str) -> None:
    """A single remaining rank is a special case: mpirun turns its MPI_Abort into exit code 0."""
    job = run(mpirun, kind, ranks, living, way, "openmpi", ulfm=True)
    assert job.returncode == {"meet": 1, **WAYS}[way]
    if (kind, way) == ("allreduce", "meet"):  # an error that nobody catches is told once: the wait, and the call
        assert re.search(rf"RankLostError: (a rank|rank {ranks - 1}) of {ranks} was lost", job.stderr)
        assert job.stderr.count("Traceback") <= 2


def test_of_a_job_with_ulfm_that_loses_a_rank_before_mpi_is_up(mpirun: JobRunner) -> None:
    code = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\nimport allreduce"
    job = mpirun(3, ["-c", code], ulfm=True, timeout=150, env={"ALLREDUCE_START_SECONDS": "4"})
    assert job.returncode == 1
    assert " of 3: MPI has not started in 4 s, so this rank ends the job" in job.stderr  # mpirun ends the rest then


def test_of_a_job_with_ulfm_whose_only_rank_ends_it(mpirun: JobRunner) -> None:
    """As the end of a program does while a collective still hangs, and as the doctor does."""
    code = "import allreduce; from allreduce.health import abort; allreduce.Topology(); abort.end_job('on purpose', 3)"
    assert mpirun(1, ["-c", code], ulfm=True).returncode == 3


def test_of_a_job_that_ends_while_a_hook_fails(mpirun: JobRunner) -> None:
    """Its end is not prevented, and the other ranks do not hang: MPI may report a failed rank meanwhile."""
    code = (
        "import allreduce; from allreduce.health import abort; topology = allreduce.Topology()\n"
        "abort.on_ending(lambda code, text: 1 / 0)\n"
        "if topology.rank == 0: abort.end_job('on purpose', 3)\n"
        "topology.world.Barrier()"
    )
    job = mpirun(2, ["-c", code], timeout=30)
    assert job.returncode == 3
    assert "while it ended the job: ZeroDivisionError" in job.stderr
