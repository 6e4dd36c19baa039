"""The machine and the versions that a run was measured with."""

import importlib.metadata
import os
import platform
from typing import Any

from allreduce.machine import identify


def describe(peers: list[str]) -> dict[str, Any]:
    """What a reader needs to judge the figures: machine, MPI library, versions, load."""
    libraries = ["numpy", "mpi4py", "ml_dtypes", *(["torch"] if "gloo" in peers else [])]
    return {
        **identify(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
        "load_before": round(os.getloadavg()[0], 2),
    }


def available_bytes() -> int | None:
    """Memory that this machine can still give without swapping; None where Linux does not tell."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
