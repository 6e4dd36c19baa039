"""Central: one rank owns all of a buffer. reduce_scatter leaves the sum there, all_gather copies from there.

For parameters that one rank keeps; as an all-reduce on its own "reduce_to_one" does the same, so this one has no
name in the registry. On one node arrays from `allocate` are in memory that all ranks reach: every rank adds its chunk
of all ranks' arrays straight into the root's, so that the sum is as fast as one of a reduce_scatter. On several nodes
each node does so for one of its ranks, and these send their sums to the root.
Steps: 2 barriers; across m nodes 1 + log2 m. Bytes: each node sends S, the root receives (m - 1) S.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays.chunks import binomial, chunk, segments
from allreduce.arrays.memory_kinds import ALLOCATED, FOREIGN
from allreduce.arrays.ops import Op
from allreduce.backend import TwoPhase
from allreduce.engine.call import check_root
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, together
from allreduce.transport.point_to_point import Transfer
from allreduce.transport.shared_segment import SharedSegment

ROOT = "learn where the root is"
BLOCK_BYTES = 256 * 1024  # what a rank adds at a time, from each rank


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
        self._windows: list[SharedSegment] = []
        self._inside: Central | None = None  # of this node, where nodes have several ranks
        self._across: Central | None = None  # of the ranks that have their nodes' sums
        if 1 < topology.nodes < topology.size:
            self._divide(topology)

    def _divide(self, topology: Topology) -> None:
        """Make the parts inside of nodes and across them."""
        inside = self._keep(topology.inside())
        places = np.flatnonzero(all_values(inside.world, self.rank == self.root, ROOT))
        leader = int(places[0]) if places.size else 0
        leaders = self._keep(topology.split(int(inside.rank != leader), ranks_per_node=1))
        self._inside = self._keep(Central(inside, root=leader, check="never"))
        if inside.rank == leader:
            root = all_values(leaders.world, self.rank == self.root, ROOT).index(True)
            self._across = self._keep(Central(leaders, root=root, check="never"))

    def owned(self, length: int, rank: int | None = None) -> slice:
        return slice(0, length if (self.rank if rank is None else rank) == self.root else 0)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda" or self.size == self.topology.nodes:  # no node has two ranks
            return super()._allocate(length, dtype, device)
        node = self._inside or self
        try:
            return together(self._comm, lambda: node.window(length, dtype))
        except UnavailableError as error:
            notices.once(self.rank, f"gradients are sent in messages: {error}")
            return super()._allocate(length, dtype, device)

    def window(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Memory that all ranks of this one node reach. Raises UnavailableError on all of them."""
        window = SharedSegment(self._comm, length * dtype.itemsize)
        self._windows = [*(each for each in self._windows if each.alive()), window]
        return window.give().view(dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        return FOREIGN if (self._inside or self).find(buffer) is None else ALLOCATED

    def _close(self) -> None:
        """Let go of the memory; an array that is still in use keeps its own."""
        self._windows.clear()

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        window = self.find(buffer)
        if self._inside is not None:
            if self._inside.size > 1:
                self._inside.phases.reduce_scatter(buffer, op.unscaled())
            if self._across is not None:
                self._across.phases.reduce_scatter(buffer, op)
        elif window is not None:
            self._add_chunk(window, buffer, op)
        elif self.rank == self.root:
            self._transfer.collect(buffer, op)
        else:
            self._transfer.send(buffer, self.root)

    def _all_gather(self, buffer: np.ndarray) -> None:
        """Binomial tree, segment by segment: a segment is passed on while the next one arrives."""
        if self._inside is not None:
            for part in (self._across, self._inside):
                if part is not None:
                    part.phases.all_gather(buffer)
            return
        self._transfer.relay(buffer, *binomial(self.rank, self.root, self.size))

    def _add_chunk(self, window: SharedSegment, buffer: np.ndarray, op: Op) -> None:
        """Add this rank's chunk of all ranks' arrays, each block of it in the cache, into the root's."""
        offset = MPI.Get_address(buffer) - window.address
        memory = window.ranks
        assert memory is not None  # this rank's array lies in it
        everyone = memory[:, offset : offset + buffer.nbytes].view(buffer.dtype)
        step = BLOCK_BYTES // buffer.itemsize
        window.fence()
        for block in segments(chunk(buffer.size, self.size, self.rank), step):
            total = self.workspace.array("total", block.stop - block.start, buffer.dtype)
            op.combine(everyone[0, block], everyone[1, block], out=total)
            for array in everyone[2:]:
                op.combine(total, array[block], out=total)
            op.finish(total)
            everyone[self.root, block] = total
        window.fence()

    def find(self, buffer: np.ndarray) -> SharedSegment | None:
        """The window of the array from `allocate` that `buffer` lies in."""
        address = MPI.Get_address(buffer)
        for window in self._windows:
            if window.address <= address < window.end and buffer.size and window.alive():
                return window
        return None
