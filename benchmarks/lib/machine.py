"""The machine: its description, its free memory, and the memory of a process."""

import ctypes
import gc
import importlib.metadata
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from allreduce import kernels
from allreduce.errors import OptionError
from allreduce.machine import identify
from allreduce.process import proc
from allreduce.transport.control import raise_together
from benchmarks.lib import sizes


def describe(peers: list[str]) -> dict[str, Any]:
    """Return the machine, MPI library, versions and load, for the record of a run."""
    libraries = ["numpy", "mpi4py", "ml_dtypes", *(["torch"] if "gloo" in peers else [])]
    return {
        **identify(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kernels": kernels.status(),
        **{name: importlib.metadata.version(name) for name in libraries},
        "load_before": round(os.getloadavg()[0], 2),
    }


def check_memory(comm: MPI.Intracomm, each: int) -> None:
    """Raise OptionError on all ranks if a machine does not have `each` bytes for each of its ranks. Collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)  # not a topology's node, which may be simulated
    ranks = local.size
    local.Free()
    free, wanted = proc.available_bytes(), each * ranks
    error = None
    if free is not None and wanted >= free:
        problem = (
            f"{ranks} ranks need {sizes.show(wanted)} for their arrays and their machine has {sizes.show(free)} left"
        )
        error = OptionError(f"{problem}; measure smaller sizes, or fewer backends")
    raise_together(comm, error)


def trim() -> None:
    """Return freed memory to the system, so that every variant starts in the same state."""
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _memory_now() -> float:
    """Return this process's proportional set size in bytes; 0 if unknown."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0.0


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the memory during the block. Yields a list; its one element becomes the largest increase in bytes."""
    before, peak, done = _memory_now(), [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory_now() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
