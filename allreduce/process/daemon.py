"""The launcher's daemon: the process of mpirun, mpiexec or Slurm on this host that has started this rank.

A daemon that is killed, or that takes the job for ended, does not end its ranks: a rank in its own code goes on, and a
rank in a call of MPI waits for ever. So a rank ends by itself when its daemon has ended.

PR_SET_PDEATHSIG does not serve: the kernel sends that signal when the thread that started this process ends, and Open
MPI's daemon may end such threads. Also the parent may be a shell, or `timeout`, between the daemon and the rank.
"""

import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

VARIABLES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_JOBID")  # of a rank
DAEMONS = ("prterun", "prted", "orted", "hydra_pmi_proxy", "slurmstepd")  # as /proc names them
GRACE_SECONDS = 1.0  # for a daemon that ends its ranks, and itself a moment earlier

_followed: list[int] = []  # descriptors of daemons


def told() -> str:
    """The values by which the launcher has told this process which rank it is; "" without a launcher. Local."""
    return " ".join(os.environ.get(name, "") for name in VARIABLES).strip()


def ancestors() -> list[tuple[int, str]]:
    """Number and name of this process's ancestors, the parent first, as far as /proc tells. Local."""
    found, number = [], os.getppid()
    while number > 1:
        try:
            status = Path(f"/proc/{number}/stat").read_text(errors="replace")
        except OSError:
            break
        name, rest = status[status.index("(") + 1 :].rsplit(") ", 1)
        found.append((number, name))
        number = int(rest.split()[1])
    return found


def find() -> tuple[int, str] | None:
    """Number and name of the daemon that has started this rank; None without one, or where none is found. Local."""
    if not told():
        return None
    return next((ancestor for ancestor in ancestors() if ancestor[1] in DAEMONS), None)


def follow() -> None:
    """From now on this process ends, with exit code 1, when the daemon that has started it has ended. Local, once.

    Nothing happens without a daemon: a program that no launcher has started outlives its shell. The same where the
    system has no pidfd_open (Linux before 5.3).
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
