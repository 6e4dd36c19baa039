"""Child processes are no ranks: multiprocessing's do not start MPI, and whoever communicates in one is told so.

A child that is started anew (spawn, forkserver) imports the program again, and with it us. It has inherited the
environment by which the launcher told its parent who it is, so that MPI, once started, would wait for ever for
ranks that do not know it. A forked child holds a copy of its parent's MPI, which no MPI allows it to use.
"""

import atexit
import contextlib
import ctypes
import os
import sys
from typing import Any, NoReturn

from allreduce.errors import ChildError

FINALIZE_COMPLETED = 5  # a state of Open MPI, from ompi_mpi_state_t

_forked = False  # this process has a copy of its parent's MPI


def is_child() -> bool:
    """True in a process that multiprocessing started, also while it still imports the program, and in its server."""
    process = sys.modules.get("multiprocessing.process")  # a child has it; nobody else needs it
    if process is None:
        return False
    importing = getattr(process.current_process(), "_inheriting", False)
    server = any("multiprocessing.forkserver import main" in argument for argument in sys.orig_argv)
    return bool(importing or server or process.parent_process() is not None)


def forked() -> bool:
    """True in a process that was forked from one in which MPI runs."""
    return _forked


def check() -> None:
    """Raise ChildError where MPI can't be used: in a forked child, and where it was not started."""
    from mpi4py import MPI

    if forked() or not MPI.Is_initialized():
        _refuse()


def guard(kind: type, *methods: str) -> None:
    """From now on these methods raise ChildError in forked children; in the ranks they cost nothing more."""

    def after_fork() -> None:
        if forked():
            for method in methods:
                setattr(kind, method, _refuse)

    os.register_at_fork(after_in_child=after_fork)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    if not (forked() or is_child()):
        raise ChildError("MPI was not started in this process (mpi4py.rc.initialize is False): call MPI.Init() first")
    raise ChildError(
        f"process {os.getpid()} is a child of process {os.getppid()}, and no rank of MPI, so it can't communicate: "
        "call allreduce in the ranks, and let their children only prepare data "
        '(a script that starts children needs if __name__ == "__main__": around what the ranks do)'
    )


def _note_fork() -> None:
    """In a forked child: MPI is its parent's, which the child must not finalize (it would wait for ranks for ever)."""
    global _forked
    mpi = sys.modules.get("mpi4py.MPI")
    _forked = _forked or (mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized())
    if _forked and not _taken_for_finalized():
        _note_exit_codes()


def _taken_for_finalized() -> bool:
    """Have Open MPI believe in this process that it was finalized, so that mpi4py lets it be. False for other MPIs."""
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        ctypes.c_int32.in_dll(library, "ompi_mpi_state").value = FINALIZE_COMPLETED
    except (OSError, ValueError):
        return False
    from mpi4py import MPI

    return MPI.Is_finalized()


_exit_codes = [0]  # of a forked child: the last is what it ends with


def _note_exit_codes() -> None:
    """Have `_end_child` know the exit code of a child that ends by sys.exit or by an exception."""
    leave, hook = sys.exit, sys.excepthook

    def exit(status: object = None) -> NoReturn:
        _exit_codes.append(status & 0xFF if isinstance(status, int) else int(status is not None))
        leave(status)

    def excepthook(*error: Any) -> None:
        _exit_codes.append(1)
        hook(*error)

    sys.exit, sys.excepthook = exit, excepthook  # type: ignore[assignment]


@atexit.register  # one of the first, so that it runs behind those of the program
def _end_child() -> None:
    """End a forked child here: behind this mpi4py finalizes MPI."""
    if _forked and not _taken_for_finalized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_exit_codes[-1])


os.register_at_fork(after_in_child=_note_fork)  # before those of guard()
