"""Processes of this machine, as Linux's /proc describes them."""

import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "hydra_", "srun", "orterun")
TERMINALS = ("/dev/pts/", "/dev/tty")


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
