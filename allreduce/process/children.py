"""Child processes are no ranks: they do not start MPI, and a child that communicates gets a ChildError.

- A child that multiprocessing or subprocess starts inherits the environment in which the launcher told its parent which
  rank it is. If the child started MPI, it would wait for ever for ranks that do not know it, or end the job.
- A forked child has a copy of its parent's MPI. No MPI allows the child to use or to finalize it.
- A rank that is killed can't end its children. They would hold the job's output open, and mpirun would wait for it. So
  children of multiprocessing end by themselves after their rank. Programs that a rank has started may go on.
"""

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from allreduce.errors import ChildError
from allreduce.process import daemon

RANK_PROCESS = "ALLREDUCE_RANK_PROCESS"  # in the environment of a rank, and so of its children: see mark()
FORKSERVER = "multiprocessing.forkserver import main"  # in the command line of the server, and of its children
FINALIZE_COMPLETED = 5  # a state of Open MPI, from ompi_mpi_state_t
POLL_SECONDS = 1.0  # until multiprocessing has told a child which process is its parent
ORPHANED = 1  # an exit code; nobody is left to ask for it

_forked = False  # this process has a copy of its parent's MPI


def is_child() -> bool:
    """True in a process that a rank started by multiprocessing, or with the rank's environment."""
    return _environment_of_a_rank() or of_multiprocessing()


def of_multiprocessing() -> bool:
    """True in a process that multiprocessing started, also in its server, and while it imports the program."""
    process = sys.modules.get("multiprocessing.process")  # a process of multiprocessing has imported it
    if process is None:
        return False
    importing = getattr(process.current_process(), "_inheriting", False)
    server = any(FORKSERVER in argument for argument in sys.orig_argv)
    return bool(importing or server or process.parent_process() is not None)


def mark() -> None:
    """Note in the environment that this process is a rank, for `is_child` in the processes that it starts. Local.

    Without a launcher nothing is noted: a child of such a process may be a job of one rank, too.
    """
    if told := daemon.told():
        os.environ[RANK_PROCESS] = f"{os.getpid()} {told}"


def _environment_of_a_rank() -> bool:
    """Whether this process has inherited the launcher's variables of a rank, and no launcher has set them since."""
    process, _, told = os.environ.get(RANK_PROCESS, "").partition(" ")
    if process in ("", str(os.getpid())) or told != daemon.told():
        return False
    # A rank may start a job of its own, whose launcher (MPICH's) tells its first rank the same.
    below = itertools.takewhile(lambda ancestor: str(ancestor[0]) != process, daemon.ancestors())
    return not any(name in daemon.DAEMONS for _, name in below)


def forked() -> bool:
    """True in a process that was forked from one in which MPI runs."""
    return _forked


def check() -> None:
    """Raise ChildError where MPI can't be used: in a forked child, and where it was not started."""
    from mpi4py import MPI

    if forked() or not MPI.Is_initialized():
        _refuse()


def guard(kind: type, *methods: str) -> None:
    """From now on these methods raise ChildError in forked children. In ranks they cost nothing."""

    def after_fork() -> None:
        if forked():
            for method in methods:
                setattr(kind, method, _refuse)

    os.register_at_fork(after_in_child=after_fork)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    if not (forked() or is_child()):
        raise ChildError("MPI was not started in this process (mpi4py.rc.initialize is False): call MPI.Init() first")
    if not forked() and _environment_of_a_rank():
        raise ChildError(
            f"process {os.getpid()} was started by a rank (process {os.environ[RANK_PROCESS].partition(' ')[0]}), and "
            "is no rank of MPI itself, so it can't communicate: call allreduce in the ranks (to run a program as a job "
            f"of its own, start it with ALLREDUCE_ALONE=1, and without {RANK_PROCESS} and the launcher's variables: "
            "OMPI_*, PMIX_*, PMI_*)"
        )
    raise ChildError(
        f"process {os.getpid()} is a child of process {os.getppid()}, and no rank of MPI, so it can't communicate: "
        "call allreduce in the ranks, and let their children only prepare data "
        '(a script that starts children needs if __name__ == "__main__": around what the ranks do)'
    )


def _note_fork() -> None:
    """In a forked child: note that MPI is its parent's. If the child finalized it, it would wait for ranks for ever."""
    global _forked
    mpi = sys.modules.get("mpi4py.MPI")
    _forked = _forked or (mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized())
    if _forked:
        note_exit_codes()
        hook = sys.excepthook

        def excepthook(*error: Any) -> None:
            _exit_codes.append(1)
            hook(*error)

        sys.excepthook = excepthook


_exit_codes = [0]  # the last is the one with which this program ends, as far as is known


@functools.cache
def note_exit_codes() -> None:
    """From now on `exit_code` knows the status that the main thread gives to sys.exit, which is replaced. Local, once.

    An excepthook and functions of atexit can't have it: Python does not call sys.excepthook for SystemExit, sets no
    sys.last_exc, and has freed the exception when functions of atexit run. After these MPI ends.
    """
    leave = sys.exit

    @functools.wraps(leave)
    def exit(status: Any = None) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            _exit_codes.append(status & 0xFF if isinstance(status, int) else int(status is not None))
        leave(status)

    sys.exit = exit


def exit_code() -> int:
    """The exit code of this process's program, as far as is known. Local."""
    return _exit_codes[-1]


@atexit.register  # one of the first, so that it runs behind those of the program
def _end_child() -> None:
    """End a forked child without MPI_Finalize, which mpi4py calls after this function.

    Under Open MPI the library is made to believe that it was called; under another MPI the child ends here.
    """
    if _forked and not _taken_for_finalized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code())


def _taken_for_finalized() -> bool:
    """Have Open MPI believe in this process that it was finalized; False for other MPIs. Local, at the end."""
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        ctypes.c_int32.in_dll(library, "ompi_mpi_state").value = FINALIZE_COMPLETED
    except (OSError, ValueError):
        return False
    from mpi4py import MPI

    return MPI.Is_finalized()


os.register_at_fork(after_in_child=_note_fork)  # before those of guard()


def end_with_parent() -> None:
    """From now on this child of multiprocessing ends when the process that started it does. Local.

    The server of a forkserver ends by itself when it has no children left; so here its children are watched.
    """
    if _is_forkserver():
        os.register_at_fork(after_in_child=_watch_parent)
    else:
        _watch_parent()


def _is_forkserver() -> bool:
    """Whether this is the server, not one of its children, which have its command line."""
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
