"""Liveness: detects that a rank's process on this machine has ended without telling MPI (by `os._exit`, say).

A process counts as gone only when this is certain: it has this rank's PID namespace, and its pid is unused, or belongs
to a process that started later, or to a zombie.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from allreduce.notices import log
from allreduce.process import proc
from allreduce.transport import ulfm

_known: dict[int, "Process"] = {}  # by world rank: processes of this node that a topology has registered
_declared: set["Process"] = set()


class Process(NamedTuple):
    """A rank's process. start: its start time in clock ticks; space: its PID namespace; name: its name in Open MPI."""

    pid: int
    start: int
    space: str
    name: tuple[int, int] | None


def of_json(value: list[Any]) -> Process:
    """Convert a JSON list from another rank to a Process. Local."""
    pid, start, space, name = value
    return Process(pid, start, space, None if name is None else (name[0], name[1]))


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
    """Register processes of ranks of this node, by world rank. Local."""
    _known.update(processes)


def declare_gone() -> None:
    """Report every registered process that has ended as failed to MPI, under ULFM. Local."""
    for process in [process for process in _known.values() if process not in _declared and gone(process)]:
        declare(process)


def declare(process: Process) -> bool:
    """Report a process that has ended as failed to MPI. False if this MPI has no such interface. Local."""
    if process in _declared:
        return True
    if process.name is None or not ulfm.declare_failed(process.name):
        return False
    _declared.add(process)
    log.debug("process %d of this node has ended without telling MPI; it counts as a failed rank", process.pid)
    return True
