"""Environment variables: those in which launchers say which rank a process is, and numbers of seconds."""

from collections.abc import Sequence
from os import environ

from allreduce.errors import OptionError

# Of Open MPI's mpirun first, then of the mpiexec of MPICH and its derivatives
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZE = OPEN_MPI_SIZE, PMI_SIZE = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
ANY_RANK = (*RANK, "PMIX_RANK", "SLURM_PROCID")  # also of srun, with or without MPI
STEP_SIZE = "SLURM_STEP_NUM_TASKS"
PROCESS = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_JOBID")  # differ from job to job


def seconds(name: str, default: float) -> float:
    """Return a number of seconds from the environment; inf, no limit, if it is 0 or less. Local. Raises OptionError."""
    given = environ.get(name)
    try:
        value = float(given) if given else default
    except ValueError:
        value = float("nan")
    if value != value:
        raise OptionError(f"{name} must be a number of seconds such as {default:g}, or 0 for never, got {given!r}")
    return value if value > 0 else float("inf")


def first(names: Sequence[str], default: str = "") -> str:
    """Return the value of the first of these variables that is set. Local."""
    return next((environ[name] for name in names if name in environ), default)
