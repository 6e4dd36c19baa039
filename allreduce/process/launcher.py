"""The launcher of this process: detects that it has started several processes and MPI does not know of them.

MPI treats a process as a job of one rank if torchrun, horovodrun or another MPI's launcher has started it, or srun
without a plugin for this MPI. Then each process would train a separate model, and all would write the same files.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from mpi4py import MPI

from allreduce.errors import LauncherError
from allreduce.machine import mpi_library
from allreduce.process.variables import OPEN_MPI_SIZE, PMI_SIZE, STEP_SIZE

ALONE = "ALLREDUCE_ALONE"  # 1: each process of a launcher is a job of one rank, on purpose

INSTEAD = "start it with mpirun instead: mpirun -n N python SCRIPT"
SAME_MPI = (
    f"start it with the mpirun of the MPI library that mpi4py has loaded ({mpi_library()}): `which mpirun python` "
    "should show one folder"
)
SRUN = (
    "start it with srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH); srun --mpi=list shows the plugins. "
    "Or start it with mpirun inside sbatch or salloc"
)
LAUNCHERS = (  # the variable with the number of processes, the launcher that sets it, and what the user should do
    ("WORLD_SIZE", "torchrun", INSTEAD),
    (PMI_SIZE, "the mpiexec of MPICH, or srun --mpi=pmi2,", f"{SAME_MPI}. By srun: {SRUN}"),
    (OPEN_MPI_SIZE, "Open MPI's mpirun", SAME_MPI),
    ("HOROVOD_SIZE", "horovodrun", INSTEAD),  # without MPI: horovodrun starts its processes itself
    # trainers and torch_backend may have copied another launcher's number there
    ("WORLD_SIZE", "a launcher of PyTorch's processes, such as torchrun,", INSTEAD),
    # SLURM_NTASKS is also that of batch scripts and salloc's shells, which are one process
    (STEP_SIZE, "srun", SRUN),
)


class Launch(NamedTuple):
    """A launcher that has started several processes, according to the environment. remedy: what the user should do."""

    launcher: str
    variable: str
    processes: int
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.launcher} has started {self.processes} processes ({self.variable}={self.processes}), and MPI sees "
            "1 rank in each: each would train a model of its own, and all would write the same files"
        )

    @property
    def advice(self) -> str:
        return f"{self.remedy}. If each process should be a separate job, set {ALONE}=1"


def started(variables: Mapping[str, str], process: int) -> Launch | None:
    """Return the launcher that has started this process as one of several, or None. Local.

    variables: the environment. process: the pid of this process.
    """
    # mpirun starts its daemons by srun; in the shell of `srun --pty bash` the program is one process
    in_a_shell = "SLURM_PTY_PORT" in variables and variables.get("SLURM_TASK_PID") != str(process)
    by_srun = not ({PMI_SIZE, OPEN_MPI_SIZE} & set(variables)) and not in_a_shell
    for variable, launcher, remedy in LAUNCHERS:
        text = variables.get(variable, "")
        processes = int(text) if text.isascii() and text.isdigit() else 0
        possible = {"torchrun": "TORCHELASTIC_RUN_ID" in variables, "srun": by_srun}.get(launcher, True)
        if processes > 1 and possible:
            return Launch(launcher, variable, processes, remedy)
    return None


def unrecognized_launch(ranks: int) -> Launch | None:
    """Return the launcher whose processes MPI treats as separate jobs of one rank, or None. Local.

    ranks: those of MPI.COMM_WORLD.
    """
    if ranks > 1 or os.environ.get(ALONE) == "1" or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return None  # a parent: MPI itself has started this process (MPI_Comm_spawn)
    return started(os.environ, os.getpid())


def check(ranks: int) -> None:
    """Raise LauncherError if a launcher started several processes, and MPI treats each as a job of one rank. Local.

    ranks: those of MPI.COMM_WORLD.
    """
    launch = unrecognized_launch(ranks)
    if launch is not None:
        raise LauncherError(f"{launch}. {launch.advice[0].upper()}{launch.advice[1:]}")
