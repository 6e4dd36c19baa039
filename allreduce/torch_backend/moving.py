"""Collectives that move tensors and compute nothing: they carry bytes, so every dtype will do."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce.torch_backend.spans import parts, whole
from allreduce.torch_backend.tensors import as_bytes, check_dtypes, readable, writable


class Mover:
    """On one communicator. Plain tensors (contiguous, on the CPU) are sent and received where they are."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` by that of rank `root`."""
        with writable(tensor, filled=self._comm.rank == root) as place:
            self._comm.Bcast(whole(as_bytes(place)), root)

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fill outputs[r] from rank r's `source`. Ranks may bring different numbers of elements."""
        self._check("all_gather", outputs, source)
        sizes = [output.nbytes for output in outputs]
        source = readable(source)
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        mine = whole(as_bytes(source))
        self._comm.Allgatherv(mine, parts(as_bytes(arrived), sizes))
        _spread(arrived, outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Fill the r-th of equal slices of `output` from rank r's `source`."""
        check_dtypes("all_gather_into_tensor", output, [source])
        if output.nbytes != source.nbytes * self._comm.size:
            raise ValueError(
                f"all_gather_into_tensor: {self._comm.size} ranks with {source.numel()} elements each fill "
                f"{source.numel() * self._comm.size} elements, and the output has {output.numel()}"
            )
        with writable(output) as place:
            # MPI wants separate memory, and FSDP passes the slice itself.
            source = readable(source.clone() if _overlap(place, source) else source)
            everything = parts(as_bytes(place), [source.nbytes] * self._comm.size)
            self._comm.Allgatherv(whole(as_bytes(source)), everything)

    def gather(self, outputs: Sequence[torch.Tensor] | None, source: torch.Tensor, root: int) -> None:
        """Fill outputs[r] on rank `root` from rank r's `source`."""
        plain = readable(source)
        mine = whole(as_bytes(plain))
        if self._comm.rank != root:
            self._comm.Gatherv(mine, None, root)
            return
        assert outputs is not None
        self._check("gather", outputs, source)
        sizes = [output.nbytes for output in outputs]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        self._comm.Gatherv(mine, parts(as_bytes(arrived), sizes), root)
        _spread(arrived, outputs)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor] | None, root: int) -> None:
        """Fill rank r's `output` from sources[r] on rank `root`."""
        with writable(output) as place:
            mine = whole(as_bytes(place))
            if self._comm.rank != root:
                self._comm.Scatterv(None, mine, root)
                return
            assert sources is not None
            self._check("scatter", sources, output)
            self._comm.Scatterv(_joined(sources), mine, root)

    def all_to_all(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Fill outputs[r] from what rank r has in its sources at this rank's place."""
        _count("all_to_all", sources, self._comm.size)
        self._check("all_to_all", outputs, sources[self._comm.rank])
        sizes = [output.nbytes for output in outputs]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        self._comm.Alltoallv(_joined(sources), parts(as_bytes(arrived), sizes))
        _spread(arrived, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_rows: Sequence[int], source_rows: Sequence[int]
    ) -> None:
        """Exchange slices along the first dimension: source_rows[r] rows go to rank r, output_rows[r] come from it.

        Empty lists stand for equal slices.
        """
        check_dtypes("all_to_all_single", output, [source])
        with writable(output) as place:
            source = readable(source.clone() if _overlap(place, source) else source)
            outgoing = parts(as_bytes(source), self._sizes("input", source, source_rows))
            incoming = parts(as_bytes(place), self._sizes("output", output, output_rows))
            self._comm.Alltoallv(outgoing, incoming)

    def _check(self, name: str, places: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Check a list of one tensor for each rank, of which this rank's is to be, or to become, `tensor`."""
        _count(name, places, self._comm.size)
        own = places[self._comm.rank]
        check_dtypes(name, own, [tensor])
        if own.nbytes != tensor.nbytes:
            raise ValueError(
                f"{name}: this rank's tensor is {tuple(tensor.shape)} and its place in the list {tuple(own.shape)}"
            )

    def _sizes(self, which: str, tensor: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """The bytes of each rank's slice of `tensor`."""
        length = tensor.shape[0] if tensor.dim() else 1
        given = list(rows) or [length // self._comm.size] * self._comm.size
        if len(given) != self._comm.size or sum(given) != length:
            raise ValueError(
                f"all_to_all_single: the {which} has {length} rows, which can't be split among {self._comm.size} ranks "
                + (f"as {given}" if rows else "evenly; give the split sizes")
            )
        row = tensor.nbytes // length if length else 0
        return [count * row for count in given]


def _count(name: str, tensors: Sequence[torch.Tensor], ranks: int) -> None:
    if len(tensors) != ranks:
        raise ValueError(f"{name}: {len(tensors)} tensors were given for {ranks} ranks; give one for each")


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
