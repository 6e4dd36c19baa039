"""Hierarchical copy: reduce inside each node, all-reduce across the nodes, copy inside each node.

After TensorFlow's HierarchicalCopyAllReduce and ChainerMN's two_dimensional (equal nodes: every rank sends its own
slice across) and hierarchical (uneven nodes: the leaders send everything).
Bytes across m equal nodes: 2 S (m - 1) / m a node, shared by its ranks. 16-bit floats of several ranks of a node cross
as sums in float32, which would be rounded twice in 16 bits, and come back as 16-bit floats: 3/4 of float32's bytes.
"""

from typing import Any

import numpy as np

from allreduce.algorithm import Context, TwoPhase, Work
from allreduce.arrays import casts
from allreduce.arrays.ops import Op
from allreduce.call.call import Call
from allreduce.errors import OptionError
from allreduce.transport import cost
from allreduce.transport.control import together
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.point_to_point import Transfer


class HierarchicalCopy(TwoPhase):
    """Reduces inside nodes by one algorithm, and across nodes by another.

    node: the algorithm inside a node, one with the two phases reduce_scatter and all_gather.
    cross: the algorithm across nodes.
    compress: options (allreduce.Half, Quantized): the compression of the messages across nodes. Error feedback is kept
        for sums of a node's ranks.
    """

    between_nodes = True

    def __init__(self, context: Context, *, node: str = "shared", cross: str = "ring", compress: Any = None) -> None:
        super().__init__(context)
        inside, across = context.inside(), context.across()
        self._node = together(self.comm, lambda: _two_phase(node, inside))
        self._cross = together(self.comm, lambda: across.make(cross, compress=compress))
        self.holds = [self._cross, self._node]
        # losses and flags are small: the MPI library is good at them
        self.lossless = self if compress is None else context.make("native")
        self.copies_unregistered = self._node.copies_unregistered
        self._leaders_only = context.layout.leaders_only
        self._transfer = Transfer(self.comm, self.workspace, context.tag)

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """`shared`'s two phases in each node: 4 fences, (n-1)/n S gamma and as many bytes copied; between them rings
        across nodes, 2 (m-1)/m S net_beta (TF HierarchicalCopyAllReduce, ChainerMN).

        Equal nodes: each rank of a node has a ring of its part. Uneven nodes: the leader collects, reduces and
        distributes S. Node sums of 16-bit floats cross as float32, results as 16 bits.
        """
        at, k, big = layout, machine, layout.largest
        crossing, total, part = nbytes, k.call, (big - 1) / big * nbytes
        if big > 1:
            crossing = 1.5 * nbytes if at.half else nbytes
            total += cost.fences(4, at, k) + cost.adding(part, at, k) + part * k.copy * at.per_core
            total += cost.fetching(nbytes, at, k)
        if len(set(at.sizes)) == 1:
            return total + cost.ring(crossing / big, at.nodes, at, k, crosses=at.nodes > 1, sharing=big)
        collecting = (big - 1) * cost.message(nbytes / big, at, k)
        return total + 2 * collecting + cost.ring(crossing, at.nodes, at, k, crosses=True)

    def work(self, call: Call, op: Op) -> Work:
        alone = self.context.layout.nodes == self.size
        return super().work(call, op)._replace(place=None if alone else self._node.work(call, op).place)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return the slice that a node rank (by default this rank's) owns; all nodes divide the buffer equally."""
        return self._node.owned(length, rank)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        count = self.context.allocations.count
        try:
            return together(self.comm, lambda: self._node.allocate(length, dtype, device))
        except BaseException:
            self.context.allocations.count = count  # some nodes may have added their array
            raise

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        """16-bit floats are sent across nodes as they are, except sums of several ranks of a node, sent as float32."""
        originals_cross = self._node.size == 1 and not self._leaders_only and self._cross.sums_half
        sums = buffer if originals_cross else casts.widened(buffer, self.workspace)
        if self._node.size > 1:
            self._node.reduce_scatter(sums, op.unscaled())
        if self._leaders_only:
            self._through_leader(sums, buffer, op)
        else:
            mine = self.owned(buffer.size)
            self._across(sums[mine], buffer[mine], op)

    scatter = reduce_scatter

    def all_gather(self, buffer: np.ndarray) -> None:
        if self._node.size > 1:
            self._node.all_gather(buffer)

    def _across(self, sums: np.ndarray, part: np.ndarray, op: Op) -> None:
        """All-reduce `sums` across nodes, and write them, finished and rounded, to `part`; both may be one array."""
        across = self._cross
        if across.size == 1 or not part.size:
            op.finish(sums)
        elif sums.dtype == part.dtype or not isinstance(across, TwoPhase):
            across.reduce(sums, op)
        else:
            across.reduce_scatter(sums, op)
            mine = across.owned(part.size)
            np.copyto(part[mine], sums[mine], casting="unsafe")
            across.all_gather(part)
            return
        if sums.dtype != part.dtype:
            np.copyto(part, sums, casting="unsafe")

    def _through_leader(self, sums: np.ndarray, buffer: np.ndarray, op: Op) -> None:
        """Uneven nodes: the leader receives its node's slices, all-reduces them across nodes, and sends them back."""
        layout = self.context.layout
        leader, *others = layout.members[layout.node_of(self.rank)]
        if self.rank != leader:
            mine = self.owned(buffer.size)
            self._transfer.send(sums[mine], leader)
            self._transfer.receive(buffer[mine], leader)
            return
        slices = [(rank, self._node.owned(buffer.size, place)) for place, rank in enumerate(others, start=1)]
        for rank, part in slices:
            self._transfer.receive(sums[part], rank)
        self._across(sums, buffer, op)
        for rank, part in slices:
            self._transfer.send(buffer[part], rank)


def _two_phase(name: str, inside: Context) -> TwoPhase:
    made = inside.make(name)
    if not isinstance(made, TwoPhase):
        raise OptionError(f"node={name!r} can't be used inside nodes: it has no reduce_scatter and all_gather")
    return made
