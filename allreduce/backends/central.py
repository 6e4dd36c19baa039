"""Central: one rank owns all of a buffer. reduce_scatter leaves the sum there, all_gather copies from there.

It is for parameters that one rank keeps. As an all-reduce it equals "reduce_to_one", so it is not in the registry. On
one node arrays from `allocate` are in memory that all ranks map: every rank sums its chunk of all ranks' arrays into
the root's array, as fast as in a reduce_scatter. On several nodes each node sums into one of its ranks, which sends the
sum to the root.
Steps: 2 barriers; across m nodes 1 + log2 m. Bytes: each node sends S, the root receives (m - 1) S.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.arrays.chunks import binomial, chunk, segments
from allreduce.arrays.ops import Op
from allreduce.backend import TwoPhase
from allreduce.engine.call import check_root
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, together
from allreduce.transport.point_to_point import Transfer
from allreduce.transport.shared_segment import SharedArrays

ROOT = "learn where the root is"
BLOCK_BYTES = 256 * 1024  # bytes that a rank adds at a time, from each rank


class Central(TwoPhase):
    """Sums at one rank, in rank order, and copies from there.

    root: the rank that owns every element of every buffer.
    """

    def __init__(self, topology: Topology, *, root: int = 0, check: str = "first") -> None:
        self.root = check_root(root, topology.size)
        super().__init__(topology, check=check)
        self.name = "central"

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._transfer = Transfer(self._comm, self.workspace, self.tag)
        self.arrays = SharedArrays(self._comm)  # from `allocate`, on this node
        self._inside: Central | None = None  # on this node's ranks, if any node has several
        self._across: Central | None = None  # on the ranks that hold their nodes' sums
        if 1 < topology.nodes < topology.size:
            self._divide(topology)

    def _divide(self, topology: Topology) -> None:
        """Create a Central inside each node, and one across nodes. Collective."""
        inside = self._add_part(topology.inside())
        places = np.flatnonzero(all_values(inside.world, self.rank == self.root, ROOT))
        leader = int(places[0]) if places.size else 0
        leaders = self._add_part(topology.split(int(inside.rank != leader), ranks_per_node=1))
        root = all_values(leaders.world, self.rank == self.root, ROOT).index(True) if inside.rank == leader else 0
        self._inside = together(self._comm, lambda: self._add_part(Central(inside, root=leader, check="never")))
        if inside.rank == leader:
            self._across = self._add_part(Central(leaders, root=root, check="never"))

    def owned(self, length: int, rank: int | None = None) -> slice:
        return slice(0, length if (self.rank if rank is None else rank) == self.root else 0)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda" or self.size == self.topology.nodes:  # no node has two ranks
            return super()._allocate(length, dtype, device)
        node = self._inside or self
        try:
            return together(self._comm, lambda: node.arrays.allocate(length, dtype))
        except UnavailableError as error:
            notices.once(self.rank, f"gradients are sent as messages instead of through shared memory: {error}")
            return super()._allocate(length, dtype, device)

    def _memory(self, buffer: np.ndarray) -> int:
        return (self._inside or self).arrays.memory_of(buffer)

    def _close(self) -> None:
        """Drop the arrays; the memory of an array that is still in use stays."""
        self.arrays.clear()

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        location = self.arrays.locate(buffer)
        if self._inside is not None:
            if self._inside.size > 1:
                self._inside.phases.reduce_scatter(buffer, op.unscaled())
            if self._across is not None:
                self._across.phases.reduce_scatter(buffer, op)
        elif location is not None:
            self._add_chunk(self.arrays.of_all_ranks(buffer, location), op)
        elif self.rank == self.root:
            self._transfer.collect(buffer, op)
        else:
            self._transfer.send(buffer, self.root)

    def _all_gather(self, buffer: np.ndarray) -> None:
        """Binomial tree, segment by segment: a segment is forwarded while the next one is received."""
        if self._inside is not None:
            for part in (self._across, self._inside):
                if part is not None:
                    part.phases.all_gather(buffer)
            return
        self._transfer.relay(buffer, *binomial(self.rank, self.root, self.size))

    def _add_chunk(self, everyone: Sequence[np.ndarray], op: Op) -> None:
        """Sum this rank's chunk of all ranks' arrays into the root's array, in blocks that fit the cache."""
        root = everyone[self.root]
        self.arrays.fence()
        for block in segments(chunk(root.size, self.size, self.rank), BLOCK_BYTES // root.itemsize):
            total = self.workspace.array("total", block.stop - block.start, root.dtype)
            op.combine(everyone[0][block], everyone[1][block], out=total)
            for array in everyone[2:]:
                op.combine(total, array[block], out=total)
            op.finish(total)
            root[block] = total
        self.arrays.fence()
