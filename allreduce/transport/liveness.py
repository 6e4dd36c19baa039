"""Liveness: detects that a rank's process on this machine has ended without telling MPI (by `os._exit`, say).

A process counts as gone only when this is certain: it has this rank's PID namespace, and its pid is unused, or belongs
to a process that started later, or to a zombie.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from allreduce.notices import log
from allreduce.process import proc
from allreduce.transport import ulfm

_known: dict[int, "Process"] = {}  # by world rank: processes of this machine that a topology has registered
_ended: dict[int, "Process"] = {}  # the ended processes of which MPI can't be told


class Process(NamedTuple):
    """A rank's process. start: its start time in clock ticks; space: its PID namespace; name: its name in Open MPI."""

    pid: int
    start: int
    space: str
    name: Sequence[int] | None


@functools.cache
def own() -> Process | None:
    """Return this process; None if its start time is unknown (no /proc). Local."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    found = proc.stat(os.getpid())
    return None if found is None else Process(os.getpid(), found.start, space, ulfm.name_in_job())


def gone(process: Process) -> bool:
    """Return whether a process has ended; False if unknown. Local."""
    here = own()
    if here is None or here.space != process.space:
        return False
    found = proc.stat(process.pid)
    if found is not None:
        return found.state in "ZX" or found.start != process.start
    try:  # /proc may hide a living process
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def know(processes: Mapping[int, Process]) -> None:
    """Register processes of ranks of this machine, by world rank. Local."""
    _known.update(processes)


def look() -> Mapping[int, Process]:
    """Look for registered processes that have ended. Under ULFM report each as failed to MPI. Local, from any thread.

    Returns the processes of which MPI can't be told, by world rank: this MPI has no such interface.
    """
    for rank, process in list(_known.items()):
        if gone(process) and _known.pop(rank, None) is not None:
            if process.name is not None and ulfm.declare_failed(process.name):
                log.debug("process %d has ended without telling MPI; it counts as a failed rank", process.pid)
            else:
                _ended[rank] = process
    return _ended
