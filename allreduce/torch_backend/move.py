"""Collectives that move tensors. They move bytes, so they take every dtype."""

import functools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from allreduce.errors import DisagreementError
from allreduce.torch_backend.tensors import as_bytes, readable, writable
from allreduce.transport import chunked
from allreduce.transport.control import raise_together
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import waiting

LARGEST = (1 << 31) - 1  # an MPI count is a C int in Open MPI 5
TAGS = 32749  # every MPI has at least this many


class TensorMover:
    """Moves tensors on one communicator. It sends and receives plain tensors (contiguous, on the CPU) in place.

    The caller has checked the arguments (module `checks`). All methods are collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._exchanges = 0  # the number is the tag: one that failed on one rank may leave messages

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` by that of rank `root`."""
        with nullcontext(readable(tensor)) if self._comm.rank == root else writable(tensor) as memory:
            chunked.broadcast(self._comm, [as_bytes(memory)], root, "broadcast of a process group")

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Fill outputs[r] from rank r's `source`, or equal slices of a single output.

        Of several outputs the numbers of elements may differ.
        """
        several, sent = len(outputs) > 1, readable(source)
        sizes = [output.nbytes for output in outputs] if several else [source.nbytes] * self._comm.size
        slices = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        row = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu") if several else outputs[0]
        with writable(row) as plain, waiting(self._comm, "all_gather of a process group"):
            memory = as_bytes(plain)
            memory[slices[self._comm.rank]] = as_bytes(sent)
            chunked.spread(self._comm, memory, slices)
        if several:
            for part, output in zip(row.split(sizes), outputs, strict=True):
                with writable(output) as plain:
                    as_bytes(plain)[:] = as_bytes(part)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Exchange slices: sent[r] elements go to rank r, received[r] come from it."""
        with writable(output) as memory:
            outputs, sources = memory.reshape(-1).split(received), readable(source).reshape(-1).split(sent)
            self.all_to_all(outputs, sources, "all_to_all_single")

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], name: str = "all_to_all"
    ) -> None:
        """Fill outputs[r] from rank r's sources[this rank]. name: of the call, for errors."""
        received, sent = ([tensor.numel() for tensor in tensors] for tensors in (outputs, sources))
        coming = np.empty(self._comm.size, np.int64)
        with waiting(self._comm, f"{name} of a process group"):
            self._comm.Alltoall(np.array(sent, np.int64), coming)
        error = None
        for rank in np.flatnonzero(coming != received)[:1]:
            error = DisagreementError(
                f"{name}: rank {rank} sends {coming[rank]} elements to rank {self._comm.rank}, which expects "
                f"{received[rank]}; give outputs (or output splits) of the sizes that peers send"
            )
        raise_together(self._comm, error)
        self.exchange(name, enumerate(sources), enumerate(outputs))

    def exchange(
        self, name: str, sent: Iterable[tuple[int, torch.Tensor]], received: Iterable[tuple[int, torch.Tensor]]
    ) -> None:
        """Send tensors to ranks, and overwrite tensors by those that are received from ranks. name: of the call."""
        self._exchanges += 1
        with ExitStack() as copies:
            places = [(rank, copies.enter_context(writable(tensor))) for rank, tensor in received]
            spans = [(place.data_ptr(), place.data_ptr() + place.nbytes) for _, place in places if place.nbytes]
            begin, end = min(spans, default=(0, 0))[0], max((end for _, end in spans), default=0)
            sources = [(rank, _apart(readable(tensor), begin, end)) for rank, tensor in sent]
            outgoing, incoming = ([(rank, as_bytes(each)) for rank, each in pairs] for pairs in (sources, places))
            try:
                chunked.exchange(self._comm, outgoing, incoming, self._exchanges % TAGS, f"{name} of a process group")
            except BaseException:
                free_later((places, sources))  # MPI may still use this memory, which the requests do not own
                raise


def _apart(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return a plain tensor, or a copy if it overlaps the addresses of the outputs, which MPI forbids."""
    overlaps = tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes
    return tensor.clone() if overlaps else tensor


def mpi_buffer(memory: np.ndarray) -> list[Any]:
    """Return the MPI buffer specification of a byte array of any size, though an MPI count is a C int."""
    if memory.size <= LARGEST:
        return [memory, memory.size, MPI.BYTE]
    return [memory, 1, _large(memory.size)]


@functools.cache
def _large(size: int) -> MPI.Datatype:
    """Return the type of this many bytes: pieces of PIECE bytes, and the rest."""
    pieces, rest = divmod(size, chunked.PIECE)
    piece = MPI.BYTE.Create_contiguous(chunked.PIECE)
    return MPI.Datatype.Create_struct([pieces, rest], [0, size - rest], [piece, MPI.BYTE]).Commit()
