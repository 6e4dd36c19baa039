"""Collectives that move tensors and compute nothing: they carry bytes, so every dtype will do."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce.messages.agreement import waiting
from allreduce.messages.parcels import broadcast
from allreduce.torch_backend.spans import parts, whole
from allreduce.torch_backend.tensors import as_bytes, readable, writable


class Mover:
    """On one communicator. Plain tensors (contiguous, on the CPU) are sent and received where they are.

    What is called makes sense: module `checks` has seen to it. All methods are collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` by that of rank `root`."""
        with writable(tensor, filled=self._comm.rank == root) as place:
            broadcast(self._comm, [as_bytes(place)], root, "broadcast of a process group")

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fill outputs[r] from rank r's `source`. Ranks may bring different numbers of elements."""
        sizes = [output.nbytes for output in outputs]
        source = readable(source)
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        mine = whole(as_bytes(source))
        with self._waiting("all_gather"):
            self._comm.Allgatherv(mine, parts(as_bytes(arrived), sizes))
        _spread(arrived, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Fill the r-th of equal slices of `output` from rank r's `source`."""
        with writable(output) as place:
            # MPI wants separate memory, and FSDP passes the slice itself.
            source = readable(source.clone() if _overlap(place, source) else source)
            everything = parts(as_bytes(place), [source.nbytes] * self._comm.size)
            with self._waiting("all_gather"):
                self._comm.Allgatherv(whole(as_bytes(source)), everything)

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """Fill outputs[r] on rank `root` from rank r's `source`."""
        plain = readable(source)
        mine = whole(as_bytes(plain))
        if self._comm.rank != root:
            with self._waiting("gather"):
                self._comm.Gatherv(mine, None, root)
            return
        sizes = [output.nbytes for output in outputs]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        with self._waiting("gather"):
            self._comm.Gatherv(mine, parts(as_bytes(arrived), sizes), root)
        _spread(arrived, outputs)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> None:
        """Fill rank r's `output` from sources[r] on rank `root`."""
        with writable(output) as place:
            mine = whole(as_bytes(place))
            with self._waiting("scatter"):
                self._comm.Scatterv(_joined(sources) if self._comm.rank == root else None, mine, root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill outputs[r] from what rank r has in its sources at this rank's place."""
        sizes = [output.nbytes for output in outputs]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        with self._waiting("all_to_all"):
            self._comm.Alltoallv(_joined(sources), parts(as_bytes(arrived), sizes))
        _spread(arrived, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Sequence[int], source_sizes: Sequence[int]
    ) -> None:
        """Exchange slices: source_sizes[r] bytes go to rank r, output_sizes[r] come from it."""
        with writable(output) as place:
            source = readable(source.clone() if _overlap(place, source) else source)
            with self._waiting("all_to_all"):
                self._comm.Alltoallv(parts(as_bytes(source), source_sizes), parts(as_bytes(place), output_sizes))

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return waiting(self._comm, f"{what} of a process group")


def _joined(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors one after another, as parts."""
    memory = np.concatenate([as_bytes(readable(tensor)) for tensor in tensors])
    return parts(memory, [tensor.nbytes for tensor in tensors])


def _spread(arrived: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy consecutive pieces of `arrived` to `outputs`."""
    ends = np.cumsum([0, *(output.nbytes for output in outputs)])
    for (begin, end), output in zip(pairwise(ends), outputs, strict=True):
        with writable(output) as place:
            as_bytes(place)[:] = as_bytes(arrived)[begin:end]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
