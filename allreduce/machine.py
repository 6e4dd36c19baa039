"""The kind of this machine: measurements of one kind do not apply to another."""

import os
import platform
from pathlib import Path
from typing import TypedDict

from mpi4py import MPI


class MachineKind(TypedDict):
    """Equal on all machines of one kind: it has no host names."""

    cpu: str  # the model's name
    cores: int  # logical cores
    mpi: str  # library and version


def identify() -> MachineKind:
    """Return the kind of this rank's machine, with all its cores, whichever of them the rank is bound to."""
    return {"cpu": _cpu_model(), "cores": os.cpu_count() or 1, "mpi": mpi_library()}


def cores() -> list[int]:
    """Return the logical cores that this process may run on (affinity and cpuset)."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return list(range(os.cpu_count() or 1))


def mpi_library() -> str:
    """Return name and version of the MPI library: "Open MPI v5.0.11", for example."""
    first = MPI.Get_library_version().strip("\0").strip().splitlines()[0]
    return " ".join(first.split(",")[0].split())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
