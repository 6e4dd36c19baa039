"""The kind of this machine (measurements of one kind do not apply to another), and the versions that run on it."""

import os
import platform
import sys
import zlib
from pathlib import Path
from typing import TypedDict

import mpi4py
import numpy as np
from mpi4py import MPI

OURS = "allreduce"
LOADED = ("torch", "cupy", "ml_dtypes")  # compared if the program has imported them


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


def versions() -> dict[str, str]:
    """Return the versions of Python, MPI and loaded packages by name; ranks should have the same. Imports nothing."""
    found = {"Python": platform.python_version(), "NumPy": np.__version__, "mpi4py": mpi4py.__version__}
    found["MPI"] = mpi_library()
    for name in (OURS, *LOADED):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def digest_of_versions() -> int:
    """Return a hash of `versions()`, which the ranks compare in a message that they exchange anyway."""
    return zlib.crc32(repr(sorted(versions().items())).encode())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
