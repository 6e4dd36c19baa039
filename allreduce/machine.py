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


def numa_node(folder: str = "/sys/devices/system/node") -> int:
    """Return the NUMA node of the cores that this process may use; -1 if they are on several, or unknown. Local.

    folder: Linux's list of NUMA nodes.
    """
    try:
        mine = os.sched_getaffinity(0)
        for path in Path(folder).glob("node[0-9]*"):
            if mine <= _cores((path / "cpulist").read_text()):
                return int(path.name.removeprefix("node"))
    except (OSError, AttributeError, ValueError):  # not Linux, or not readable in this container
        pass
    return -1


def _cores(text: str) -> set[int]:
    """Return the numbers in a list as "0-3,8,10-11"."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {core for first, *last in spans for core in range(int(first), int(last[0] if last else first) + 1)}
