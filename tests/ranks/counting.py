"""Counts the bytes that are sent, and the calls of MPI."""

from collections import Counter
from typing import Any

import numpy as np
from mpi4py import MPI


class Counting:
    """A communicator that counts the bytes sent to every rank, and its calls by name. It behaves as `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self.sent, self.calls = comm, Counter[int](), Counter[str]()

    def Isend(self, segment: np.ndarray, dest: int, tag: int = 0) -> MPI.Request:  # noqa: N802, MPI's name
        self.sent[dest] += segment.nbytes
        return self._comm.Isend(segment, dest, tag)

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += name[0].isupper()  # the others are attributes
        return getattr(self._comm, name)
