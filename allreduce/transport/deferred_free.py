"""What was given up half-way and can't go yet: MPI, or another rank, may still write into its memory.

Without losses that happens once, at the end of a program, so it stays to the end. A program that outlives ranks lets go
of what it has given up two losses ago: since then all ranks that are left have met many times.
"""

from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

_kept: list[list[Any]] = [[]]  # since the last repair, and before it
_cut_off: list[list[MPI.Comm]] = [[]]  # communicators that were revoked; they can be freed


def keep(given_up: Any) -> None:
    """Keep an object, or memory. Local."""
    _kept[-1].append(given_up)


def free_later(comms: Iterable[MPI.Comm]) -> None:
    """Keep communicators that were revoked. Local."""
    _cut_off[-1].extend(comms)


def repaired() -> None:
    """A loss is repaired: let go of what was given up before the one before it. Local."""
    for comm in [comm for comms in _cut_off[:-1] for comm in comms]:
        comm.Free()
    _kept[:-1] = []
    _cut_off[:-1] = []
    _kept.append([])
    _cut_off.append([])
