"""Whether what this rank prints ends in a terminal: a launcher stands between them."""

import os
from pathlib import Path

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
