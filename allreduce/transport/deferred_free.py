"""Deferred free: keeps the memory of unfinished operations, into which MPI or another rank may still write.

Without failed ranks this happens only at the end of a program, and the memory is never freed. Each recovery frees the
memory deferred before the previous recovery: all surviving ranks have synchronized since.
"""

from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

_given_up: list[list[Any]] = [[]]  # last list: since the last recovery; first: before it
_revoked: list[list[MPI.Comm]] = [[]]  # communicators, in lists as above


def free_later(given_up: Any) -> None:
    """Keep an object alive until MPI and other ranks can no longer write to its memory. Local."""
    _given_up[-1].append(given_up)


def free_comms_later(comms: Iterable[MPI.Comm]) -> None:
    """Keep revoked communicators, and free them later. Local."""
    _revoked[-1].extend(comms)


def repaired() -> None:
    """Free the objects deferred before the previous recovery; called after each recovery. Local."""
    for comm in [comm for comms in _revoked[:-1] for comm in comms]:
        comm.Free()
    _given_up[:-1] = []
    _revoked[:-1] = []
    _given_up.append([])
    _revoked.append([])
