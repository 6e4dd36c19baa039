"""Whole tensors dealt to ranks, for optimizers that read whole tensors; and the messages that this costs.

A reduce_scatter leaves each rank the sums of its chunk of a buffer, and a chunk ends anywhere in a tensor. So after it
each rank sends the elements of its chunk that belong to another rank's tensors to that rank (`Transfer.deliver`); after
the update the elements go back (`Transfer.collect`), and an all_gather of the chunks follows. An element whose chunk
and tensor belong to one rank is not sent, so `deal` prefers that rank. All ranks together send at most S (n-1)/n bytes
in each direction, where a reduce_scatter of S bytes sends S (n-1).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.errors import UnavailableError
from allreduce.transport.chunked import exchange
from allreduce.transport.control import all_values

TAG = 3  # of the messages of a transfer; see backup.TAG
GOOD = 1.2  # the largest share, in multiples of the mean, that needs no better deal
ROOM = 1.1  # the largest share, in multiples of the mean, up to which a rank takes tensors of its own chunk first


def deal(sizes: Sequence[int], homes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Return the rank that owns each tensor.

    sizes: of the tensors. homes: for each tensor, how much of it is in the chunk of each rank.

    The largest share is at most max(1.2 * mean, the largest tensor), unless there are so few tensors that dealing them
    from the largest to the smallest, each to the rank with the smallest share, gives more (3 equal tensors on 2 ranks).
    """
    largest, mean = max(sizes, default=0), sum(sizes) / ranks
    near = _dealt(sizes, homes, ranks, max(largest, ROOM * mean))
    if _largest_share(sizes, near, ranks) <= max(largest, GOOD * mean):
        return near
    return min(near, _dealt(sizes, homes, ranks, 0), key=lambda owners: _largest_share(sizes, owners, ranks))


def _dealt(sizes: Sequence[int], homes: Sequence[Sequence[int]], ranks: int, room: float) -> list[int]:
    """Deal from the largest to the smallest tensor: each to the rank whose chunk has the most of it, among those whose
    share stays within `room`; if there is none, to the rank with the smallest share."""
    shares, owners = [0] * ranks, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size, home = sizes[tensor], homes[tensor]
        fitting = [rank for rank in range(ranks) if shares[rank] + size <= room]
        nearest = partial(_rank_key, home, shares)
        owner = min(fitting, key=nearest) if fitting else shares.index(min(shares))
        owners[tensor] = owner
        shares[owner] += size
    return owners


def _rank_key(home: Sequence[int], shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Sort ranks by how much of a tensor is in their chunks, the most first, then by their shares."""
    return -home[rank], shares[rank]


def _largest_share(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> int:
    shares = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        shares[owner] += size
    return max(shares)


def deal_in_order(sizes: Sequence[int], parts: int) -> list[slice]:
    """Return `parts` slices of the concatenated tensors, one after the other, that begin and end between tensors.

    They end where the tensors' ends are nearest to those of equal slices. If the largest is then more than
    max(1.2 * mean, the largest tensor), they are the ones whose largest is the smallest possible.
    """
    ends = [0, *accumulate(sizes)]
    total, largest = ends[-1], max(sizes, default=0)
    cuts = [min(ends, key=lambda end: abs(end * parts - total * part)) for part in range(parts + 1)]
    if max(stop - start for start, stop in pairwise(cuts)) > max(largest, GOOD * total / parts):
        low, high = largest, total  # the smallest possible largest slice lies between them
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(_cuts(ends, middle)) <= parts + 1 else (middle + 1, high)
        cuts = _cuts(ends, low)
        cuts += [total] * (parts + 1 - len(cuts))
    return [slice(*cut) for cut in pairwise(cuts)]


def _cuts(ends: Sequence[int], most: int) -> list[int]:
    """Cut between tensors into slices as long as possible, of at most `most` elements each."""
    cuts = [0]
    for before, end in pairwise(ends):
        if end - cuts[-1] > most:
            cuts.append(before)
    return [*cuts, ends[-1]]


class Chunks:
    """The chunks of some buffers that each rank owns, and the ranks that together own all of them once. Creating it is
    collective.

    comm: of all ranks. node_index: of this rank's node. lengths: of the buffers. owned: this rank's chunk of each.

    team: the ranks of this rank's node, in order, if the ranks of each node own everything; otherwise all ranks.
    of: for each buffer, the chunk of each rank of the team.
    """

    def __init__(self, comm: MPI.Intracomm, node_index: int, lengths: Sequence[int], owned: Sequence[slice]) -> None:
        mine = [[each.start, each.stop] for each in owned]
        everyone = all_values(comm, [node_index, mine], "learn which chunks the ranks own")
        chunks = [[slice(*chunk) for chunk in of_rank] for _, of_rank in everyone]
        nodes: dict[int, list[int]] = {}
        for rank, (node, _) in enumerate(everyone):
            nodes.setdefault(node, []).append(rank)

        def once(ranks: list[int]) -> bool:
            """Whether these ranks together own every element once."""
            of_ranks = zip(*(chunks[rank] for rank in ranks), strict=True)
            sums = [sum(chunk.stop - chunk.start for chunk in of_buffer) for of_buffer in of_ranks]
            return sums == list(lengths)

        by_node = all(map(once, nodes.values()))
        if not by_node and not once(list(range(comm.size))):
            raise UnavailableError(
                "whole tensors can't be dealt to these ranks: the backend gives elements to several of them"
            )
        self.team = nodes[node_index] if by_node else list(range(comm.size))
        self.of = [[chunks[rank][number] for rank in self.team] for number in range(len(lengths))]


class Transfer:
    """Moves elements of a buffer between the ranks that own their chunks and the ranks that own their tensors.

    comm: of all ranks. team: the ranks among which the buffer is divided (see Chunks). chunks, shares: of each of them,
    its chunk, and the slices of the buffer that its tensors occupy, in order. Both together cover the same elements,
    each once. Creating it is local.
    """

    def __init__(
        self, comm: MPI.Intracomm, team: Sequence[int], chunks: Sequence[slice], shares: Sequence[Sequence[slice]]
    ) -> None:
        self._comm, me = comm, team.index(comm.rank)
        others = [(number, rank) for number, rank in enumerate(team) if number != me]
        mine, tensors = [chunks[me]], list(shares[me])
        self._foreign = [(rank, span) for number, rank in others for span in _common(mine, shares[number])]
        self._missing = [(rank, span) for number, rank in others for span in _common([chunks[number]], tensors)]

    @property
    def elements(self) -> int:
        """The number of elements that this rank sends in `deliver`."""
        return sum(span.stop - span.start for _, span in self._foreign)

    def deliver(self, array: Any) -> None:
        """After a reduce_scatter of a 1-D array: receive the elements of this rank's tensors, in place. Collective."""
        self._exchange(array, self._foreign, self._missing, "deliver gradients to the ranks that own their tensors")

    def collect(self, array: Any) -> None:
        """Before an all_gather: receive the elements of this rank's chunk, in place. Collective."""
        self._exchange(array, self._missing, self._foreign, "collect updated parameters in chunks")

    def _exchange(
        self, array: Any, sent: list[tuple[int, slice]], received: list[tuple[int, slice]], what: str
    ) -> None:
        if not sent and not received:
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


def _common(some: Sequence[slice], others: Sequence[slice]) -> Iterator[slice]:
    """Yield the slices of the elements that are in both, in order, adjacent ones joined."""
    held: slice | None = None
    for first in some:
        for second in others:
            start, stop = max(first.start, second.start), min(first.stop, second.stop)
            if start >= stop:
                continue
            if held is not None and held.stop == start:
                held = slice(held.start, stop)
                continue
            if held is not None:
                yield held
            held = slice(start, stop)
    if held is not None:
        yield held
