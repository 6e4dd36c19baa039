"""Children of multiprocessing end when their rank has ended, however it ended: they would keep mpirun's output open.

A rank that is killed can't end its children. Those of a forkserver keep their server alive, and the server keeps them:
neither ends by itself. No MPI here.
"""

import os
import threading
import time
from multiprocessing import process
from pathlib import Path

POLL_SECONDS = 1.0  # until multiprocessing has told a child which process is its parent
ORPHANED = 1  # exit code; nobody is left to ask for it


def end_with_parent() -> None:
    """From now on this child of multiprocessing ends when the process that started it does. Local.

    In a forkserver it holds for the children that it forks; the server ends by itself when none is left.
    """
    if _is_forkserver():
        os.register_at_fork(after_in_child=_watch)
    else:
        _watch()


def _is_forkserver() -> bool:
    """Whether this is the server, not one of its children, which have its command line."""
    command = _command_line("self")
    return b"multiprocessing.forkserver import main" in command and _command_line(os.getppid()) != command


def _command_line(process: int | str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _watch() -> None:
    threading.Thread(target=_end_after_parent, name="allreduce: end with the parent", daemon=True).start()


def _end_after_parent() -> None:
    while (parent := process.parent_process()) is None:  # while the child imports the program
        time.sleep(POLL_SECONDS)
    parent.join()
    os._exit(ORPHANED)
