"""Memory as MPI takes it: counts of bytes, or of larger units where a count of bytes would not fit into a C int."""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

LARGEST = (1 << 31) - 1  # an MPI count or displacement is a C int in Open MPI 5


def whole(memory: np.ndarray) -> list[Any]:
    """All of `memory`, an array of bytes."""
    ((count,), _, unit) = _in_units([memory.size])
    return [memory, count, unit]


def parts(memory: np.ndarray, sizes: Sequence[int]) -> list[Any]:
    """`memory` as consecutive parts of `sizes` bytes, one a rank."""
    counts, places, unit = _in_units(sizes)
    return [memory, counts, places, unit]


def _in_units(sizes: Sequence[int]) -> tuple[list[int], list[int], MPI.Datatype]:
    total = sum(sizes)
    if total <= LARGEST:
        return list(sizes), [0, *accumulate(sizes)][:-1], MPI.BYTE
    size = math.gcd(*sizes)
    for prime in (2, 3, 5, 7):
        while size > LARGEST and size % prime == 0:
            size //= prime
    if size > LARGEST or total // size > LARGEST:
        raise ValueError(f"{total} bytes of tensors are more than this MPI moves in one call; split the tensors")
    counts = [each // size for each in sizes]
    return counts, [0, *accumulate(counts)][:-1], _unit(size)


@functools.cache
def _unit(size: int) -> MPI.Datatype:
    return MPI.BYTE.Create_contiguous(size).Commit()
