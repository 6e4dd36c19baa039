"""What copies, falls back or oversubscribes says so once, on rank 0, through the logger "allreduce"."""

import logging
import os
from pathlib import Path

log = logging.getLogger("allreduce")
_said: set[str] = set()


def once(rank: int, text: str) -> None:
    """Say `text` the first time, if this is rank 0."""
    if rank == 0 and text not in _said:
        _said.add(text)
        log.warning("allreduce: %s", text)


def shown(value: object, most: int = 60) -> str:
    """What was found in a file, as far as it fits a line, and without characters that a terminal would act upon."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # too deep, or a number too long, for Python to write
        text = type(value).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "hydra_", "srun", "orterun")


def on_terminal(descriptor: int = 2) -> bool:
    """True when a file descriptor (1: standard output, 2: standard error) ends in a terminal. Local.

    Under a launcher the launcher's own one is asked: Open MPI's gives its ranks a pseudo-terminal as standard output
    wherever that goes in the end.
    """
    pid, launched = os.getppid(), False
    for _ in range(3):  # MPICH has a proxy between mpiexec and the rank
        try:
            process = Path("/proc", str(pid))
            if not (process / "comm").read_text().startswith(LAUNCHERS):
                break
            launched = True
            if os.readlink(process / "fd" / str(descriptor)).startswith(("/dev/pts/", "/dev/tty")):
                return True
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # not Linux, or another user's process
            break
    return not launched and os.isatty(descriptor)
