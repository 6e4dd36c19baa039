"""Whole tensors dealt to ranks, for optimizers that read whole tensors; and the messages that this costs.

A reduce_scatter leaves each rank the sums of its chunk of a buffer, and a chunk ends anywhere in a tensor. So after it
each rank sends the elements of its chunk that belong to another rank's tensors to that rank (`Share.deliver`); after
the update the elements go back (`Share.collect`), and an all_gather of the chunks follows. An element whose chunk
and tensor belong to one rank is not sent, so `deal` prefers that rank. All ranks together send at most S (n-1)/n bytes
in each direction, where a reduce_scatter of S bytes sends S (n-1).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.backend import AllReduce
from allreduce.errors import UnavailableError
from allreduce.transport.chunked import exchange
from allreduce.transport.control import all_values

TAG = 4  # of the messages of a transfer; see backup.TAG
GOOD = 1.2  # the largest share, in multiples of the mean, that is good enough
ROOM = 1.1  # the largest share, in multiples of the mean, up to which a rank takes tensors of its own chunk first


def deal(sizes: Sequence[int], homes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Return the rank that owns each tensor.

    sizes: of the tensors. homes: for each tensor, how much of it is in the chunk of each rank.

    The largest share is at most max(1.2 * mean, the largest tensor), unless there are very few tensors. It is at most
    4/3 of the smallest possible then (R. L. Graham: Bounds on multiprocessing timing anomalies, 1969).
    """
    largest, mean = max(sizes, default=0), sum(sizes) / ranks
    near, share = _dealt(sizes, homes, ranks, max(largest, ROOM * mean))
    return near if share <= max(largest, GOOD * mean) else _dealt(sizes, homes, ranks, 0)[0]


def _dealt(sizes: Sequence[int], homes: Sequence[Sequence[int]], ranks: int, room: float) -> tuple[list[int], int]:
    """Deal from the largest to the smallest tensor: each to the rank whose chunk has the most of it, among those whose
    share stays within `room` (of several, that with the smallest share); if there is none, to the rank with the
    smallest share. Returns the owners, and the largest share."""
    shares, owners = [0] * ranks, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda tensor: -sizes[tensor]):
        fitting = [rank for rank in range(ranks) if shares[rank] + sizes[tensor] <= room]
        nearest = [(-homes[tensor][rank], shares[rank], rank) for rank in fitting]
        owners[tensor] = min(nearest)[-1] if nearest else shares.index(min(shares))
        shares[owners[tensor]] += sizes[tensor]
    return owners, max(shares)


def joined(slices: Iterable[slice]) -> list[slice]:
    """Return slices that are in order without empty ones, adjacent ones joined."""
    found: list[slice] = []
    for each in slices:
        if found and found[-1].stop == each.start:
            found[-1] = slice(found[-1].start, each.stop)
        elif each.start < each.stop:
            found.append(each)
    return found


class Share:
    """The part of a buffer that this rank updates, and messages between ranks that own chunks and owners of tensors.

    parts: slices of the buffer, in order: this rank's chunk, or tensors. comm: of all ranks. foreign: (rank, slice) of
    the elements of this rank's chunk that are in other ranks' parts. missing: the elements of its parts that are in
    other ranks' chunks. Creating it is local.
    """

    def __init__(
        self,
        parts: Sequence[slice],
        comm: MPI.Intracomm | None = None,
        foreign: Sequence[tuple[int, slice]] = (),
        missing: Sequence[tuple[int, slice]] = (),
    ) -> None:
        self.parts = tuple(parts)
        self._comm, self._foreign, self._missing = comm, foreign, missing

    @property
    def sends(self) -> bool:
        """Whether `deliver` and `collect` may send elements: ranks own other tensors than chunks."""
        return self._comm is not None

    def deliver(self, array: Any) -> None:
        """After a reduce_scatter of a 1-D array: receive the elements of this rank's parts, in place. Collective."""
        self._exchange(array, self._foreign, self._missing, "deliver gradients to the ranks that own their tensors")

    def collect(self, array: Any) -> None:
        """Before an all_gather: receive the elements of this rank's chunk, in place. Collective."""
        self._exchange(array, self._missing, self._foreign, "collect updated parameters in chunks")

    def _exchange(
        self, array: Any, sent: Sequence[tuple[int, slice]], received: Sequence[tuple[int, slice]], what: str
    ) -> None:
        if self._comm is None or not (sent or received):
            return
        on_gpu = gpu.is_gpu_array(array)
        outgoing = [(rank, array[span].get() if on_gpu else array[span]) for rank, span in sent]
        incoming = [
            (rank, np.empty(span.stop - span.start, array.dtype) if on_gpu else array[span]) for rank, span in received
        ]
        exchange(self._comm, outgoing, incoming, TAG, what)
        if on_gpu:
            for (_, span), (_, host) in zip(received, incoming, strict=True):
                array[span].set(host)


def shares_of(
    backend: AllReduce,
    comm: MPI.Intracomm,
    lengths: Sequence[int],
    tensors: Sequence[Sequence[slice]] | None,
    itemsizes: Sequence[int],
) -> list[Share]:
    """Return this rank's share of each of some buffers: its chunk, or whole tensors. Collective.

    backend: reduces the buffers, and decides which rank owns which chunk. comm: of all ranks; the transfers use it.
    lengths, itemsizes: of the buffers. tensors: for each buffer the slices of its tensors, one after the other, which
    cover it; None for chunks. Chunks that end between tensors everywhere are the shares. A rank without a chunk gets no
    tensors.
    """
    owned = list(map(backend.owned, lengths))
    if tensors is None:
        return [Share([each]) for each in owned]
    node_index = backend.topology.node_index
    held = [[each.start, each.stop] for each in owned]
    everyone = all_values(comm, [node_index, held], "learn which chunks the ranks own")
    owns = [any(start < stop for start, stop in of_rank) for _, of_rank in everyone]
    team = [rank for rank in _team(node_index, lengths, everyone) if owns[rank]]
    if comm.rank not in team:
        return [Share(()) for _ in tensors]
    chunks = [[slice(*everyone[rank][1][number]) for rank in team] for number in range(len(lengths))]
    ends = [{0, *(each.stop for each in slices)} for slices in tensors]
    if all({chunk.start, chunk.stop} <= of for of, chunks_of in zip(ends, chunks, strict=True) for chunk in chunks_of):
        inside = zip(tensors, owned, strict=True)
        return [
            Share([each for each in slices if own.start <= each.start and each.stop <= own.stop])
            for slices, own in inside
        ]
    sizes, homes = [], []
    for slices, itemsize, chunks_of in zip(tensors, itemsizes, chunks, strict=True):
        for each in slices:
            sizes.append((each.stop - each.start) * itemsize)
            homes.append([max(0, min(each.stop, own.stop) - max(each.start, own.start)) for own in chunks_of])
    owners = iter(deal(sizes, homes, len(team)))
    shares, me = [], team.index(comm.rank)
    others = [(number, rank) for number, rank in enumerate(team) if number != me]
    for slices, chunks_of in zip(tensors, chunks, strict=True):
        of_ranks: list[list[slice]] = [[] for _ in team]
        for each, owner in zip(slices, owners, strict=False):
            of_ranks[owner].append(each)
        mine = of_ranks[me]
        foreign = [(rank, span) for number, rank in others for span in _common([chunks_of[me]], of_ranks[number])]
        missing = [(rank, span) for number, rank in others for span in _common([chunks_of[number]], mine)]
        shares.append(Share(mine, comm, foreign, missing))
    return shares


def _team(node_index: int, lengths: Sequence[int], everyone: Sequence[Any]) -> list[int]:
    """Return the ranks that together own each element of the buffers once: those of this rank's node, if the ranks of
    each node do; otherwise all ranks. everyone: of each rank, its node and its chunks."""
    nodes: dict[int, list[int]] = {}
    for rank, (node, _) in enumerate(everyone):
        nodes.setdefault(node, []).append(rank)

    def once(ranks: Iterable[int]) -> bool:
        of_ranks = zip(*(everyone[rank][1] for rank in ranks), strict=True)
        return [sum(stop - start for start, stop in of_buffer) for of_buffer in of_ranks] == list(lengths)

    if all(map(once, nodes.values())):
        return nodes[node_index]
    if not once(range(len(everyone))):
        raise UnavailableError(
            "whole tensors can't be dealt to these ranks: the backend gives elements to several of them"
        )
    return list(range(len(everyone)))


def _common(some: Sequence[slice], others: Sequence[slice]) -> list[slice]:
    """Return the slices of the elements that are in both, in order, adjacent ones joined."""
    pairs = ((max(first.start, second.start), min(first.stop, second.stop)) for first in some for second in others)
    return joined(slice(start, stop) for start, stop in pairs if start < stop)
