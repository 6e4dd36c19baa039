"""The processes and the memory of this machine, as Linux's /proc and control groups describe them."""

import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "hydra_", "srun", "orterun")
TERMINALS = ("/dev/pts/", "/dev/tty")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # a container's limits
USAGE = "memory/memory.usage_in_bytes"


class Stat(NamedTuple):
    """The state of a process ("Z": zombie), and its start time in clock ticks."""

    name: str
    state: str
    parent: int
    start: int


def stat(process: int) -> Stat | None:
    """Read the state of a process; None if /proc does not have it. Local."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
        name, rest = text.partition("(")[2].rsplit(") ", 1)
        fields = rest.split()
        return Stat(name, fields[0], int(fields[1]), int(fields[19]))
    return None


def ancestors() -> list[tuple[int, str]]:
    """Return (pid, name) of this process's ancestors, the parent first, as far as /proc has them. Local."""
    found, number = [], os.getppid()
    while number > 1 and (above := stat(number)) is not None:
        found.append((number, above.name))
        number = above.parent
    return found


def on_terminal(descriptor: int = 2) -> bool:
    """Return whether a file descriptor (1: standard output, 2: standard error) ends in a terminal. Local.

    Under a launcher its descriptor is checked: Open MPI's gives its ranks a pseudo-terminal as standard output,
    also if mpirun's output is redirected.
    """
    launchers = list(takewhile(lambda above: above[1].startswith(LAUNCHERS), ancestors()))
    for number, _ in launchers:
        with suppress(OSError):  # another user's process
            if os.readlink(f"/proc/{number}/fd/{descriptor}").startswith(TERMINALS):
                return True
    return not launchers and os.isatty(descriptor)


def available_bytes() -> int | None:
    """Return the memory that is available on this machine, and in this container; None if unknown. Local."""
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", USAGE)):  # cgroup 2, 1
            with suppress(OSError, ValueError):  # "max", or no such group
                most, now = (int((CONTROL_GROUP / name).read_text()) for name in (limit, used))
                return min(free, max(0, most - now + _cached((CONTROL_GROUP / used).parent / "memory.stat")))
        return free
    return None


def _cached(path: Path) -> int:
    """Return the bytes of files in memory that the kernel frees when a program needs memory. Local."""
    with suppress(OSError, KeyError, ValueError):
        return int(dict(line.split() for line in path.read_text().splitlines())["inactive_file"])
    return 0


def core_quota() -> float | None:
    """Return the container's CPU quota in cores; None for no limit. Local."""
    with suppress(OSError, ValueError):
        if (CONTROL_GROUP / "cpu.max").exists():
            quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        else:
            quota, period = ((CONTROL_GROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None  # ValueError: "max"
    return None
