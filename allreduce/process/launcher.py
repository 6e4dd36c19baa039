"""The launcher of this process: how many processes it says that it has started, and whether MPI knows of them.

MPI takes a process for a job of one rank when torchrun, horovodrun or another MPI's launcher has started it, or srun
without a plugin for this MPI. Then each process trains a model of its own, and all write the same files.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from mpi4py import MPI

from allreduce.errors import LauncherError
from allreduce.machine import mpi_library

ALONE = "ALLREDUCE_ALONE"  # 1: processes that a launcher has started together are jobs of one rank each, on purpose
TORCH, OPEN_MPI, PMI, STEP = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"
HOROVOD = "HOROVOD_SIZE"
SRUN = (
    "start it with srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH); srun --mpi=list shows the plugins that there "
    "are. Or start it with mpirun inside of sbatch or salloc"
)


class Launch(NamedTuple):
    """What the environment says of the processes that were started together with this one."""

    launcher: str
    variable: str
    processes: int
    remedy: str


def started(variables: Mapping[str, str], process: int) -> Launch | None:
    """The launcher that has started this process as one of several, or None. Local.

    variables: the environment. process: the number of this process.

    SLURM_NTASKS says nothing: batch scripts and salloc's shells have it too, which are one process. Only the tasks of
    a step have SLURM_STEP_NUM_TASKS. A launcher inside of a step replaces it: mpirun starts its daemons by srun.
    """
    world, pmi, open_mpi, step = (_number(variables, name) for name in (TORCH, PMI, OPEN_MPI, STEP))
    torch = Launch("torchrun", TORCH, world, _in_the_place_of("torchrun"))
    if world > 1 and "TORCHELASTIC_RUN_ID" in variables:
        return torch
    if pmi > 1:
        by_slurm = variables.get("SLURM_MPI_TYPE", "").startswith("pmi")
        by = f"srun --mpi={variables['SLURM_MPI_TYPE']}" if by_slurm else "the mpiexec of MPICH or a relative of it"
        return Launch(by, PMI, pmi, SRUN if by_slurm else _mpirun())
    if open_mpi > 1:
        return Launch("Open MPI's mpirun", OPEN_MPI, open_mpi, _mpirun())
    if (horovod := _number(variables, HOROVOD)) > 1:  # without MPI: it starts its processes by itself
        return Launch("horovodrun", HOROVOD, horovod, _in_the_place_of("horovodrun"))
    if world > 1:  # after the others, whose number trainers and torch_backend may have copied there
        return torch._replace(launcher="a launcher of PyTorch's processes, such as torchrun,")
    if step > 1 and not ({PMI, OPEN_MPI} & set(variables)) and not _in_a_shell(variables, process):
        plugin = variables.get("SLURM_MPI_TYPE", "none")
        return Launch("srun" if plugin == "none" else f"srun --mpi={plugin}", STEP, step, SRUN)
    return None


def mistaken(ranks: int) -> Launch | None:
    """The launcher whose processes MPI takes for jobs of one rank each, or None where all is well. Local.

    ranks: those of MPI.COMM_WORLD.
    """
    if ranks > 1 or os.environ.get(ALONE) == "1" or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return None  # a parent: MPI itself has started this process, later than the others
    return started(os.environ, os.getpid())


def check(ranks: int) -> None:
    """Raise LauncherError where several processes were started and MPI sees each of them alone. Local.

    ranks: those of MPI.COMM_WORLD.
    """
    launch = mistaken(ranks)
    if launch is not None:
        raise LauncherError(
            f"{launch.launcher} has started {launch.processes} processes ({launch.variable}={launch.processes}), and "
            "MPI sees 1 rank in each: each would train a model of its own, and all would write the same files. "
            f"{launch.remedy[0].upper()}{launch.remedy[1:]}. Where each process is to be a job of its own: {ALONE}=1"
        )


def _in_the_place_of(launcher: str) -> str:
    return f"start it with mpirun in the place of {launcher}: mpirun -n N python SCRIPT"


def _mpirun() -> str:
    return (
        f"start it with the mpirun of the MPI library that mpi4py has loaded ({mpi_library()}): `which mpirun python` "
        "shows one folder"
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _in_a_shell(variables: Mapping[str, str], process: int) -> bool:
    """Whether this is a program in the shell of `srun --pty bash`: that is one process, whatever the step has."""
    return "SLURM_PTY_PORT" in variables and variables.get("SLURM_TASK_PID") != str(process)
