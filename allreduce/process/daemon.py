"""The launcher's daemon: the process of mpirun, mpiexec or Slurm on this host that started this rank.

A daemon that is killed does not end its ranks, so a rank ends by itself when its daemon has ended.

PR_SET_PDEATHSIG can't be used: the kernel sends that signal when the thread that started this process ends, which Open
MPI's daemon may do; and the parent may be a shell, or `timeout`.
"""

import os
import select
import sys
import threading
import time
from contextlib import suppress

from allreduce.process import proc, variables

DAEMONS = ("prterun", "prted", "orted", "hydra_pmi_proxy", "slurmstepd")  # their names in /proc
GRACE_SECONDS = 1.0  # the daemon may exit a moment before it has ended its ranks

_followed: list[int] = []  # descriptors of daemons


def told() -> str:
    """Return the launcher's variables that identify this rank, joined; "" without a launcher. Local."""
    return " ".join(os.environ.get(name, "") for name in variables.PROCESS).strip()


def find() -> tuple[int, str] | None:
    """Return pid and name of the daemon that started this rank; None if there is none, or none is found. Local."""
    if not told():
        return None
    return next((ancestor for ancestor in proc.ancestors() if ancestor[1] in DAEMONS), None)


def follow() -> None:
    """Start a thread that ends this process, with exit code 1, when its launcher's daemon has ended. Local, once.

    Does nothing without a daemon: a program that no launcher has started outlives its shell. Also nothing without
    pidfd_open (Linux before 5.3).
    """
    found = find()
    if found is None or _followed or not hasattr(os, "pidfd_open"):
        return
    try:
        _followed.append(os.pidfd_open(found[0]))
    except OSError:  # an older kernel, or a container that forbids it
        return
    threading.Thread(
        target=_wait_for_its_end, args=(_followed[0], *found), name="allreduce daemon", daemon=True
    ).start()


def _wait_for_its_end(descriptor: int, number: int, name: str) -> None:
    gone = select.poll()
    gone.register(descriptor, select.POLLIN)
    gone.poll()
    time.sleep(GRACE_SECONDS)
    text = f"process {os.getpid()} ends: the daemon that has started it ({name}, process {number}) is gone\n"
    with suppress(Exception):  # nobody may read it any more
        os.write((sys.__stderr__ or sys.stderr).fileno(), text.encode())
    os._exit(1)
