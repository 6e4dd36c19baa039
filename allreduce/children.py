"""Child processes are no ranks: multiprocessing's do not start MPI, and whoever communicates in one is told so.

A child that is started anew (spawn, forkserver) imports the program again, and with it us. It has inherited the
environment by which the launcher told its parent who it is, so that MPI, once started, would wait for ever for
ranks that do not know it. A forked child holds a copy of its parent's MPI, which no MPI allows it to use.
"""

import os
import sys
from typing import Any, NoReturn

from allreduce.errors import ChildError

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
    global _forked
    from mpi4py import MPI

    _forked = MPI.Is_initialized() and not MPI.Is_finalized()


os.register_at_fork(after_in_child=_note_fork)  # before those of guard()
