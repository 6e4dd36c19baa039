"""Recursive halving and doubling: few steps, for any number of ranks.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, 2005.
With p the largest power of two up to n. Steps: 2 log2 p, and 2 more when n > p. Bytes sent per rank:
2 S (p - 1) / p; each of the n - p extra ranks hands its buffer to a partner and gets the result back,
2 S more for such a pair.
"""

import numpy as np

from allreduce.algorithm import Context, TwoPhase
from allreduce.arrays import chunks
from allreduce.arrays.ops import Op
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.point_to_point import Transfer


class HalvingDoubling(TwoPhase):
    """Each step halves the part that a rank reduces, with a partner twice as far away as in the step before: the
    largest halves go to the nearest rank, which is on the same node.

    Of five ranks, rank 4 hands its buffer to rank 0. Then ranks 0 and 1, 2 and 3 exchange halves, ranks 0 and 2, 1
    and 3 quarters; and rank 0 finishes quarter 0, rank 2 quarter 1, rank 1 quarter 2, rank 3 quarter 3.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._transfer = Transfer(self.comm, self.workspace, context.tag)
        self._power, self._extras = chunks.power_of_two(self.size)

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma (Thakur, Rabenseifner and Gropp 2005), p the power of
        two up to n; 2 steps of S more if p < n. 16-bit floats are sent as float32.

        The first and largest steps are inside nodes; in later ones all ranks of a node use its link at once.
        """
        at, k, total = layout, machine, machine.call
        size = 2 * nbytes if at.half else nbytes
        power, extras = chunks.power_of_two(at.ranks)
        for step in range(1, power.bit_length()):
            part, sharing = size / 2**step, at.crossing(1 << (step - 1))
            total += 2 * (cost.link(part, k, sharing) if sharing else cost.message(part, at, k))
            total += cost.adding(part, at, k)
        if extras:
            sharing = min(extras, at.largest)
            total += 2 * (cost.message(size, at, k) if at.nodes == 1 else cost.link(size, k, sharing))
            total += cost.adding(size, at, k)
        return total

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return a chunk of `length` / p elements for each of the first p ranks, an empty one for the extra ranks."""
        rank = self.rank if rank is None else rank
        if rank >= self._power:
            return slice(length, length)
        distances = [1 << bit for bit in range(self._power.bit_length() - 1)]  # of the partners: 1, 2, 4 up to p / 2
        index = sum(self._power // (2 * distance) for distance in distances if rank & distance)
        return chunks.chunk(length, self._power, index)

    def scatter(self, buffer: np.ndarray, op: Op) -> None:
        if self.rank >= self._power:
            self._transfer.send(buffer, self.rank - self._power)
            return
        if self.rank < self._extras:
            self._transfer.combine(buffer, self.rank + self._power, op, finish=False)
        for partner, kept, given in chunks.halvings(buffer, self._power, self.rank):
            last = 2 * abs(partner - self.rank) == self._power
            self._transfer.swap_combine(given, partner, kept, partner, op, finish=last)

    def all_gather(self, buffer: np.ndarray) -> None:
        if self.rank >= self._power:
            self._transfer.receive(buffer, self.rank - self._power)
            return
        for partner, kept, given in reversed(list(chunks.halvings(buffer, self._power, self.rank))):
            self._transfer.swap(kept, partner, given, partner)
        if self.rank < self._extras:
            self._transfer.send(buffer, self.rank + self._power)
