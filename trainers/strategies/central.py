"""Central: one rank owns all of a buffer. reduce_scatter leaves the sum there, all_gather copies from there.

It is for parameters that one rank keeps. As an all-reduce it equals "reduce_to_one". On one node arrays from `allocate`
are in memory that all ranks map: every rank sums its chunk of all ranks' arrays into the root's array, as fast as in a
reduce_scatter. On several nodes each node sums into one of its ranks, which sends the sum to the root.
Steps: 2 barriers; across m nodes 1 + log2 m. Bytes: each node sends S, the root receives (m - 1) S.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import Context, TwoPhase, Work, notices
from allreduce.arrays.chunks import binomial, chunk, segments
from allreduce.arrays.ops import Op
from allreduce.call.call import Call, check_root
from allreduce.errors import UnavailableError
from allreduce.transport.control import together
from allreduce.transport.point_to_point import Transfer
from allreduce.transport.shared_segment import shared_rows

BLOCK_BYTES = 256 * 1024  # bytes that a rank adds at a time, from each rank


class Central(TwoPhase):
    """Sums at one rank, in rank order, and copies from there.

    root: the rank that owns every element of every buffer.
    """

    def __init__(self, context: Context, *, root: int = 0) -> None:
        super().__init__(context)
        self.root = check_root(root, self.size)
        layout = context.layout
        leaders = [root if root in ranks else ranks[0] for ranks in layout.members]
        node = layout.node_of(self.rank)
        self._ranks, self._leader = layout.members[node], leaders[node]  # the leader gets the sums of the node
        self._inside = context.inside()
        self._across = None if len(leaders) == 1 else context.split(int(self.rank != self._leader))
        self._place = sorted(leaders).index(root)  # of the root among the leaders
        self._within = Transfer(self._inside.comm, self.workspace, context.tag)
        self._between = Transfer((self._across or context).comm, self.workspace, context.tag)

    def owned(self, length: int, rank: int | None = None) -> slice:
        return slice(0, length if (self.rank if rank is None else rank) == self.root else 0)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda" or not length or self.size == self.context.layout.nodes:  # no node has two ranks
            return super().allocate(length, dtype, device)
        inside = self._inside
        try:
            rows = together(self.comm, lambda: shared_rows(inside.comm, length * dtype.itemsize))
        except UnavailableError as error:
            notices.once(self.rank, f"gradients are sent as messages instead of through shared memory: {error}")
            return super().allocate(length, dtype, device)
        mine = rows[inside.rank].view(dtype)
        self.context.allocations.add(mine, keeps=False, ranks=inside.size)
        return mine

    def work(self, call: Call, op: Op) -> Work:
        return super().work(call, op)._replace(place=self.context.allocations.place)

    def scatter(self, buffer: np.ndarray, op: Op) -> None:
        inside, leader = self._inside, self._ranks.index(self._leader)
        inner = op if self._across is None else op.unscaled()
        if inside.size > 1:
            found = self.context.allocations.at(buffer)
            if found is not None and found[0].ranks:
                self._add_chunk(found[0].views(found[1], buffer), leader, inner)
            elif inside.rank == leader:
                self._within.collect(buffer, inner)
            else:
                self._within.send(buffer, leader)
        if self._across is not None and self.rank == self._leader:
            if self.rank == self.root:
                self._between.collect(buffer, op)
            else:
                self._between.send(buffer, self._place)

    def all_gather(self, buffer: np.ndarray) -> None:
        """Binomial trees, segment by segment: a segment is forwarded while the next one is received."""
        inside, leader = self._inside, self._ranks.index(self._leader)
        if self._across is not None and self.rank == self._leader:
            self._between.relay(buffer, *binomial(self._across.rank, self._place, self._across.size))
        self._within.relay(buffer, *binomial(inside.rank, leader, inside.size))

    def _add_chunk(self, everyone: Sequence[np.ndarray], leader: int, op: Op) -> None:
        """Sum this rank's chunk of the node's arrays into the leader's array, in blocks that fit the cache."""
        root, fence = everyone[leader], self.context.executor.fence
        fence()
        for block in segments(chunk(root.size, len(everyone), self._inside.rank), BLOCK_BYTES // root.itemsize):
            total = self.workspace.array("total", block.stop - block.start, root.dtype)
            op.combine(everyone[0][block], everyone[1][block], out=total)
            for array in everyone[2:]:
                op.combine(total, array[block], out=total)
            op.finish(total)
            root[block] = total
        fence()
