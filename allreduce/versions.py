"""The versions of what runs on the ranks, which should be the same on all of them."""

import platform
import sys
import zlib
from collections.abc import Sequence

import mpi4py
import numpy as np
from mpi4py import MPI

from allreduce import machine, notices
from allreduce.errors import DisagreementError
from allreduce.transport.control import all_values, known

OURS = "allreduce"
LOADED = ("torch", "cupy", "ml_dtypes")  # where the program has imported them


def here() -> dict[str, str]:
    """By name, on this rank. Nothing is imported."""
    found = {"Python": platform.python_version(), "NumPy": np.__version__, "mpi4py": mpi4py.__version__}
    found["MPI"] = machine.mpi_library()
    for name in (OURS, *LOADED):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def digest() -> int:
    """Of all of them, for a message that goes round anyway."""
    return zlib.crc32(repr(sorted(here().items())).encode())


def compare(comm: MPI.Intracomm, digests: Sequence[int]) -> None:
    """Tell which ranks have other versions, where their digests, the same on all of them, differ. Collective.

    Raises DisagreementError on all ranks when it is ours: what they send each other need not mean the same.
    """
    if len(set(digests)) == 1:
        return
    everyone = all_values(comm, here(), "compare versions")
    for name in dict.fromkeys(name for found in everyone for name in found):
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(everyone):
            if name in found:  # a program may use a package on some ranks only
                holders.setdefault(found[name], []).append(rank)
        if len(holders) < 2:
            continue
        table = "; ".join(f"{version} on ranks {', '.join(map(str, ranks))}" for version, ranks in holders.items())
        if name == OURS:
            raise known(DisagreementError(f"the ranks have different versions of {OURS}: {table}; install one"), comm)
        notices.once(comm.rank, f"the ranks have different versions of {name}: {table}")
