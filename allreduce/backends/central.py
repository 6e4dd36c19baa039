"""Central: one rank owns all of a buffer. reduce_scatter leaves the sum there, all_gather copies from there.

For parameters that one rank keeps; as an all-reduce on its own "reduce_to_one" does the same, so this one has no
name in the registry. On one node arrays from `allocate` are in memory that all ranks reach: every rank adds its chunk
of all ranks' arrays straight into the root's, so that the sum is as fast as one of a reduce_scatter.
Steps: 2 barriers; across nodes 1 + log2 n. Bytes: each rank sends S, the root receives (n - 1) S.
"""

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays.chunks import chunk, segments
from allreduce.arrays.ops import Op
from allreduce.arrays.signature import ALLOCATED, FOREIGN
from allreduce.errors import OptionError, UnavailableError
from allreduce.messages.transfer import Transfer
from allreduce.messages.tree import binomial
from allreduce.messages.window import Window
from allreduce.topology import Topology
from allreduce.two_phase import TwoPhase

BLOCK_BYTES = 256 * 1024  # what a rank adds at a time, from each rank


class Central(TwoPhase):
    """Sums at one rank, in rank order, and copies from there.

    root: the rank that owns every element of every buffer.
    """

    tagged = True

    def __init__(self, topology: Topology, *, root: int = 0, check: str = "first") -> None:
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < topology.size:
            raise OptionError(f"root={root!r} is no rank of this topology; give one from 0 to {topology.size - 1}")
        self.root = root
        super().__init__(topology, check=check)
        self.name = "central"

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._transfer = Transfer(self._comm, self.workspace, self._tag)
        self._windows: list[Window] = []

    def owned(self, length: int, rank: int | None = None) -> slice:
        return slice(0, length if (self.rank if rank is None else rank) == self.root else 0)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> np.ndarray:
        if device == "cuda" or self.topology.nodes > 1 or self.size == 1:
            return super()._allocate(length, dtype, device)
        try:
            window = Window(self._comm, length * dtype.itemsize)
        except UnavailableError as error:  # on all ranks
            notices.once(self.rank, f"gradients are sent in messages: {error}")
            return super()._allocate(length, dtype, device)
        self._windows = [*(each for each in self._windows if each.alive()), window]
        return window.give().view(dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        return FOREIGN if self._find(buffer) is None else ALLOCATED

    def _close(self) -> None:
        """Let go of the memory; an array that is still in use keeps its own."""
        self._windows.clear()

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        window = self._find(buffer)
        if window is not None:
            self._add_chunk(window, buffer, op)
        elif self.rank == self.root:
            self._transfer.collect(buffer, op)
        else:
            self._transfer.send(buffer, self.root)

    def _all_gather(self, buffer: np.ndarray) -> None:
        """Binomial tree, segment by segment: a segment is passed on while the next one arrives."""
        self._transfer.relay(buffer, *binomial(self.rank, self.root, self.size))

    def _add_chunk(self, window: Window, buffer: np.ndarray, op: Op) -> None:
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

    def _find(self, buffer: np.ndarray) -> Window | None:
        """The window of the array from `allocate` that `buffer` lies in."""
        address = MPI.Get_address(buffer)
        for window in self._windows:
            if window.address <= address < window.end and buffer.size and window.alive():
                return window
        return None
