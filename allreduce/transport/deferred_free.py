"""Deferred free: keeps the memory of unfinished operations, into which MPI or another rank may still write.

Without failed ranks this happens only at the end of a program, and the memory is never freed. Each recovery frees the
memory deferred before the previous recovery: all surviving ranks have synchronized since.
"""

from itertools import chain
from typing import Any

from mpi4py import MPI

_given_up: list[list[Any]] = [[]]  # last list: since the last recovery; first: before it


def free_later(*given_up: Any) -> None:
    """Keep objects alive until MPI and other ranks can no longer write to their memory. Communicators must be revoked;
    they are freed then. Local."""
    _given_up[-1].extend(given_up)


def repaired() -> None:
    """Free the objects deferred before the previous recovery; called after each recovery. Local."""
    for each in chain(*_given_up[:-1]):
        if isinstance(each, MPI.Comm):
            each.Free()
    _given_up[:-1] = []
    _given_up.append([])
