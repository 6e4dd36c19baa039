"""Ring: bandwidth-optimal, the classic of deep learning.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
Steps: 2 (n - 1). Bytes sent per rank: 2 S (n - 1) / n.
"""

import numpy as np

from allreduce.base import TwoPhase
from allreduce.chunks import chunk
from allreduce.ops import Op
from allreduce.topology import Topology
from allreduce.transfer import Transfer


class Ring(TwoPhase):
    """Partial sums walk round the ring once, finished chunks walk round it once more."""

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        super().__init__(topology, check=check)
        self._transfer = Transfer(self._comm, self.workspace)
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        # Chunk c starts at rank c + 1 and gains one summand a step; after n - 1 steps it ends at rank c.
        for step in range(1, self.size):
            outgoing, kept = self._chunk(buffer, -step), self._chunk(buffer, -step - 1)
            self._transfer.swap_combine(outgoing, self._right, kept, self._left, op, finish=step == self.size - 1)

    def _all_gather(self, buffer: np.ndarray) -> None:
        for step in range(self.size - 1):
            outgoing, incoming = self._chunk(buffer, -step), self._chunk(buffer, -step - 1)
            self._transfer.swap(outgoing, self._right, incoming, self._left)

    def _chunk(self, buffer: np.ndarray, behind: int) -> np.ndarray:
        return buffer[chunk(buffer.size, self.size, (self.rank + behind) % self.size)]
