"""Deferred free: memory that was given up half-way and that MPI, or another rank, may still write into.

Without failed ranks that happens once, at the end of a program, so the memory stays to the end. A program that goes on
after failures frees what it gave up two failures ago: since then all ranks that are left have met many times.
"""

from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

_given_up: list[list[Any]] = [[]]  # since the last repair, and before it
_revoked: list[list[MPI.Comm]] = [[]]  # communicators


def free_later(given_up: Any) -> None:
    """Hold an object, or memory. Local."""
    _given_up[-1].append(given_up)


def free_comms_later(comms: Iterable[MPI.Comm]) -> None:
    """Hold communicators that were revoked. Local."""
    _revoked[-1].extend(comms)


def repaired() -> None:
    """The ranks go on after a failure: free what was given up before the failure before it. Local."""
    for comm in [comm for comms in _revoked[:-1] for comm in comms]:
        comm.Free()
    _given_up[:-1] = []
    _revoked[:-1] = []
    _given_up.append([])
    _revoked.append([])
