"""Liveness: whether the process of a rank of this machine has ended without telling MPI, as by `os._exit`.

A process counts as gone only when this is certain: both have the same PID namespace, and the number of the process is
unused, or belongs to a process that started later, or to a zombie.
"""

import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from allreduce.notices import log
from allreduce.transport import ulfm

_known: dict[int, "Process"] = {}  # by number in the job: those of this node that a topology has shown
_declared: set["Process"] = set()


class Process(NamedTuple):
    """A rank's process. start: its start time in clock ticks; space: its PID namespace; name: Open MPI's for it."""

    pid: int
    start: int
    space: str
    name: tuple[int, int] | None


def of_json(value: list[Any]) -> Process:
    """A process that another rank has sent as JSON, which has no tuples."""
    pid, start, space, name = value
    return Process(pid, start, space, None if name is None else (name[0], name[1]))


@functools.cache
def own() -> Process | None:
    """This process; None where the system does not tell when it started (no /proc). Local."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    found = _state_and_start(os.getpid())
    return None if found is None else Process(os.getpid(), found[1], space, ulfm.name_in_job())


def gone(process: Process) -> bool:
    """Whether a process has ended. False where that can't be known. Local."""
    here = own()
    if here is None or here.space != process.space:
        return False
    found = _state_and_start(process.pid)
    if found is not None:
        return found[0] in "ZX" or found[1] != process.start
    try:  # /proc may hide a process that lives
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def know(processes: Mapping[int, Process]) -> None:
    """These ranks of this node, by their numbers in the job, have these processes. Local."""
    _known.update(processes)


def declare_gone() -> None:
    """Report every known process that has ended as failed to MPI, where ranks may be lost. Local."""
    for process in [process for process in _known.values() if process not in _declared and gone(process)]:
        declare(process)


def declare(process: Process) -> bool:
    """Report a process that has ended as failed to MPI. False where this MPI can't be told. Local."""
    if process in _declared:
        return True
    if process.name is None or not ulfm.declare_failed(process.name):
        return False
    _declared.add(process)
    log.debug("process %d of this node has ended without a word; it counts as a lost rank", process.pid)
    return True


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """The state and the start time of a process, from /proc; None where it has none there."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        fields = f.read().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None
