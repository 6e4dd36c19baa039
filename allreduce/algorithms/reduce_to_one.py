"""Reduce to one: one rank sums all buffers and broadcasts the result, as TensorFlow's ReductionToOneDevice.

It adds in rank order, so the result does not depend on the root.
Steps: 1 + log2 n. Bytes: each rank sends S, the root receives (n - 1) S; on the way back a rank sends S to each of its
children in the tree, of which the root has the most, log2 n.
"""

import numpy as np

from allreduce.algorithm import Algorithm, Context
from allreduce.arrays.chunks import binomial
from allreduce.arrays.ops import Op
from allreduce.call.call import check_root
from allreduce.transport import cost
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.point_to_point import Transfer


class ReduceToOne(Algorithm):
    """Sum at one rank in rank order, then copy back along a binomial tree.

    root: the rank that adds.
    """

    def __init__(self, context: Context, *, root: int = 0) -> None:
        super().__init__(context)
        self.root = check_root(root, self.size)
        self._transfer = Transfer(self.comm, self.workspace, context.tag)

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """(n-1) (alpha + S beta + S gamma) at the root; back in a tree, in which the root sends log2 n messages of S.

        The link of the root's node carries the messages of all ranks on other nodes.
        """
        at, k = layout, machine
        inside, apart = cost.message(nbytes, at, k), at.ranks - at.largest
        total = k.call + (at.largest - 1) * inside + cost.adding((at.ranks - 1) * nbytes, at, k)
        total += cost.link(nbytes, k, apart) + apart * k.alpha if apart else 0.0
        return total + cost.rounds(at.largest) * inside + cost.rounds(at.nodes) * cost.link(nbytes, k)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if self.rank == self.root:
            self._transfer.collect(buffer, op)
        else:
            self._transfer.send(buffer, self.root)
        # Back along a binomial tree: a segment is forwarded while the next one is received.
        self._transfer.relay(buffer, *binomial(self.rank, self.root, self.size))
