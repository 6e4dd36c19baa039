"""Child processes are not ranks: they do not start MPI, and a child that communicates gets a ChildError.

- A child that multiprocessing or subprocess starts inherits the launcher's variables. If it started MPI, it would wait
  for ever for ranks that do not know it, or end the job.
- A forked child has a copy of its parent's MPI. No MPI library allows the child to use or to finalize it.
- Children of multiprocessing end by themselves after their rank: else mpirun would wait for their output.
"""

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from allreduce.errors import ChildError
from allreduce.process import daemon, proc

RANK_PROCESS = "ALLREDUCE_RANK_PROCESS"  # in the environment of a rank, and so of its children: see mark()
FORKSERVER = "multiprocessing.forkserver import main"  # in the command line of the server, and of its children
POLL_SECONDS = 1.0  # interval of checks until multiprocessing has set a child's parent process
ORPHANED = 1  # an exit code that no process reads

_forked = False  # this process has a copy of its parent's MPI


def is_child() -> bool:
    """Return True in a process that a rank started by multiprocessing, or with the rank's environment. Local."""
    return _environment_of_a_rank() or of_multiprocessing()


def of_multiprocessing() -> bool:
    """Return True in a process of multiprocessing, also in its server, and while it imports the program. Local."""
    process = sys.modules.get("multiprocessing.process")  # a process of multiprocessing has imported it
    if process is None:
        return False
    importing = getattr(process.current_process(), "_inheriting", False)
    server = any(FORKSERVER in argument for argument in sys.orig_argv)
    return bool(importing or server or process.parent_process() is not None)


def mark() -> None:
    """Record in the environment that this process is a rank, for `is_child` in the processes that it starts. Local.

    Without a launcher it does nothing: a child of such a process may be a job of one rank, too.
    """
    if told := daemon.told():
        os.environ[RANK_PROCESS] = f"{os.getpid()} {told}"


def _environment_of_a_rank() -> bool:
    """Return whether this process inherited a rank's launcher variables, and no launcher has set them since."""
    process, _, told = os.environ.get(RANK_PROCESS, "").partition(" ")
    if process in ("", str(os.getpid())) or told != daemon.told():
        return False
    # A rank may start another job, whose launcher (MPICH's) sets the same values for its first rank.
    below = itertools.takewhile(lambda ancestor: str(ancestor[0]) != process, proc.ancestors())
    return not any(name in daemon.DAEMONS for _, name in below)


def forked() -> bool:
    """Return True in a process that was forked from one in which MPI runs. Local."""
    return _forked


def check() -> None:
    """Raise ChildError if MPI can't be used: in a forked child, or if it was not started. Local."""
    from mpi4py import MPI

    if forked() or not MPI.Is_initialized():
        _refuse()


def guard(kind: type, *methods: str) -> None:
    """Make these methods raise ChildError in forked children. In ranks this costs nothing. Local."""

    def after_fork() -> None:
        if forked():
            for method in methods:
                setattr(kind, method, _refuse)

    os.register_at_fork(after_in_child=after_fork)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    if not (forked() or is_child()):
        raise ChildError("MPI was not started in this process (mpi4py.rc.initialize is False): call MPI.Init() first")
    rank = os.environ.get(RANK_PROCESS, str(os.getppid())).partition(" ")[0]
    raise ChildError(
        f"process {os.getpid()} was started by a rank (process {rank}) and is no MPI rank, so it can't communicate: "
        "call allreduce in the ranks, and let their children only prepare data (a script that starts children needs "
        'if __name__ == "__main__": around the ranks\' code). To run a program as a job of its own, start it with '
        f"ALLREDUCE_ALONE=1, and without {RANK_PROCESS} and the launcher's variables: OMPI_*, PMIX_*, PMI_*"
    )


def _record_fork() -> None:
    """In a forked child: record that MPI is its parent's. If it finalized MPI, it would wait for ranks for ever."""
    global _forked
    mpi = sys.modules.get("mpi4py.MPI")
    _forked = _forked or (mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized())
    if _forked:
        record_exit_codes()
        hook = sys.excepthook

        def excepthook(*error: Any) -> None:
            _exit_codes.append(1)
            hook(*error)

        sys.excepthook = excepthook


_exit_codes = [0]  # codes passed to sys.exit; the last one is taken as this program's exit code


@functools.cache
def record_exit_codes() -> None:
    """Replace sys.exit, so that `exit_code` returns the status that the main thread passes to it. Local, once.

    Excepthooks and atexit functions can't read it: Python does not call sys.excepthook for SystemExit, and has freed it
    when atexit functions run.
    """
    leave = sys.exit

    @functools.wraps(leave)
    def exit(status: Any = None) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _exit_codes.append(status & 0xFF if isinstance(status, int) else int(status is not None))
        leave(status)

    sys.exit = exit


def exit_code() -> int:
    """Return the exit code of this process's program, as far as is known. Local."""
    return _exit_codes[-1]


@atexit.register  # registered early, so it runs after the program's own functions
def _end_child() -> None:
    """End a forked child without MPI_Finalize, which mpi4py would call after this function."""
    if _forked:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code())


os.register_at_fork(after_in_child=_record_fork)  # runs before the functions of guard()


def end_with_parent() -> None:
    """Make this child of multiprocessing end when the process that started it ends. Local.

    A forkserver's server ends by itself when it has no children left, so its children are watched instead.
    """
    if _is_forkserver():
        os.register_at_fork(after_in_child=_watch_parent)
    else:
        _watch_parent()


def _is_forkserver() -> bool:
    """Return whether this is the server, not one of its children, which have the same command line."""
    command = _command_line("self")
    return FORKSERVER.encode() in command and _command_line(os.getppid()) != command


def _command_line(process: int | str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _watch_parent() -> None:
    threading.Thread(target=_end_after_parent, name="allreduce: end with the parent", daemon=True).start()


def _end_after_parent() -> None:
    from multiprocessing import process

    while (parent := process.parent_process()) is None:  # while the child imports the program
        time.sleep(POLL_SECONDS)
    parent.join()
    os._exit(ORPHANED)
