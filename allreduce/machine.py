"""What kind of machine this is (measurements made on one kind say nothing about another), and what runs on it."""

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
LOADED = ("torch", "cupy", "ml_dtypes")  # where the program has imported them


class Machine(TypedDict):
    """Alike on all machines of one kind: no host names."""

    cpu: str  # the model's name
    cores: int  # logical ones
    mpi: str  # library and version


def identify() -> Machine:
    """The kind of the machine that this rank runs on: with all its cores, wherever the launcher has bound the rank."""
    return {"cpu": _cpu_model(), "cores": os.cpu_count() or 1, "mpi": mpi_library()}


def cores() -> list[int]:
    """The logical cores that this process may run on: by its affinity and its cpuset."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return list(range(os.cpu_count() or 1))


def mpi_library() -> str:
    """Name and version of the MPI library, "Open MPI v5.0.11" or "MPICH Version: 5.0.2" say."""
    first = MPI.Get_library_version().strip("\0").strip().splitlines()[0]
    return " ".join(first.split(",")[0].split())


def versions() -> dict[str, str]:
    """The versions of what runs on this rank, which should be the same on all; by name. Nothing is imported."""
    found = {"Python": platform.python_version(), "NumPy": np.__version__, "mpi4py": mpi4py.__version__}
    found["MPI"] = mpi_library()
    for name in (OURS, *LOADED):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def digest_of_versions() -> int:
    """Of all of them, for a message that goes round anyway."""
    return zlib.crc32(repr(sorted(versions().items())).encode())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
