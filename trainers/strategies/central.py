"""Central: a few ranks own all of a buffer, each a slice. reduce_scatter leaves the sums there, all_gather copies from
there.

It is for parameters that some of the ranks keep. As an all-reduce it equals "reduce_to_one". On one node arrays from
`allocate` are in memory that all ranks map: every rank sums its chunk of all ranks' arrays into the owners' arrays, as
fast as in a reduce_scatter. On several nodes each node sums an owner's slice into one of its ranks, which sends the sum
to the owner.
Steps: 2 barriers; across m nodes 1 + log2 m. Bytes: each node sends S, the owners receive (m - 1) S together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import Context, TwoPhase, Work, notices
from allreduce.arrays.chunks import binomial, chunk, segments
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import Workspace
from allreduce.call.call import Call, check_root
from allreduce.errors import UnavailableError
from allreduce.transport.control import together
from allreduce.transport.point_to_point import Transfer
from allreduce.transport.shared_segment import shared_rows

BLOCK_BYTES = 256 * 1024  # bytes that a rank adds at a time, from each rank


class Central(TwoPhase):
    """Sums at some ranks, in rank order, and copies from there.

    roots: the ranks that own the elements of every buffer, each one slice of it, in order.
    """

    def __init__(self, context: Context, *, roots: Sequence[int] = (0,)) -> None:
        super().__init__(context)
        self._roots = [check_root(root, self.size) for root in roots]
        self._inside = context.inside()
        self._within = Transfer(self._inside.comm, self.workspace, context.tag)
        self._ways = [_Way(context, root, self.workspace) for root in self._roots]

    def owned(self, length: int, rank: int | None = None) -> slice:
        rank = self.rank if rank is None else rank
        if rank not in self._roots:
            return slice(0, 0)
        return chunk(length, len(self._roots), self._roots.index(rank))

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
        inner = op if self.context.layout.nodes == 1 else op.unscaled()
        if self._inside.size > 1:
            found = self.context.allocations.at(buffer)
            if found is not None and found[0].ranks:
                self._add_chunk(found[0].views(found[1], buffer), inner)
            else:
                for way, part in self._parts(buffer):
                    if self._inside.rank == way.leader:
                        self._within.collect(part, inner)
                    else:
                        self._within.send(part, way.leader)
        for way, part in self._parts(buffer):
            way.collect(part, op)

    def all_gather(self, buffer: np.ndarray) -> None:
        """Binomial trees, segment by segment: a segment is forwarded while the next one is received."""
        inside = self._inside
        for way, part in self._parts(buffer):
            way.spread(part)
            self._within.relay(part, *binomial(inside.rank, way.leader, inside.size))

    def _parts(self, buffer: np.ndarray) -> list[tuple["_Way", np.ndarray]]:
        """Return the owners' slices of a buffer, each with its way to the owner."""
        owned = [self.owned(buffer.size, root) for root in self._roots]
        return [(way, buffer[part]) for way, part in zip(self._ways, owned, strict=True)]

    def _add_chunk(self, everyone: Sequence[np.ndarray], op: Op) -> None:
        """Sum this rank's chunk of the node's arrays into the leaders' arrays, in blocks that fit the cache."""
        fence, first = self.context.executor.fence, everyone[0]
        mine = chunk(first.size, len(everyone), self._inside.rank)
        fence()
        for way, root in zip(self._ways, self._roots, strict=True):
            part, total_of = self.owned(first.size, root), everyone[way.leader]
            both = slice(max(mine.start, part.start), max(mine.start, min(mine.stop, part.stop)))
            for block in segments(both, BLOCK_BYTES // first.itemsize):
                total = self.workspace.array("total", block.stop - block.start, first.dtype)
                op.combine(first[block], everyone[1][block], out=total)
                for array in everyone[2:]:
                    op.combine(total, array[block], out=total)
                op.finish(total)
                total_of[block] = total
        fence()


class _Way:
    """The ranks over which a slice goes to its owner: one of each node. Creating it is collective.

    root: the owner. leader: the rank of this node, among its ranks, that has the node's sums.
    """

    def __init__(self, context: Context, root: int, workspace: Workspace) -> None:
        layout = context.layout
        leaders = [root if root in ranks else ranks[0] for ranks in layout.members]
        node = layout.node_of(context.rank)
        self.leader = layout.members[node].index(leaders[node])
        self._takes_part = len(leaders) > 1 and context.rank == leaders[node]
        self._owns, self._place = context.rank == root, sorted(leaders).index(root)  # of the root among the leaders
        across = None if len(leaders) == 1 else context.split(int(context.rank != leaders[node]))
        self._comm = (across or context).comm
        self._transfer = Transfer(self._comm, workspace, context.tag)

    def collect(self, part: np.ndarray, op: Op) -> None:
        """Sum the nodes' sums at the owner."""
        if not self._takes_part:
            return
        if self._owns:
            self._transfer.collect(part, op)
        else:
            self._transfer.send(part, self._place)

    def spread(self, part: np.ndarray) -> None:
        """Copy the slice from its owner to one rank of each node."""
        if self._takes_part:
            self._transfer.relay(part, *binomial(self._comm.rank, self._place, self._comm.size))
