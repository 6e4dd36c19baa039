"""Hierarchical copy: reduce inside each node, all-reduce across the nodes, copy inside each node.

After TensorFlow's HierarchicalCopyAllReduce and ChainerMN's two_dimensional (equal nodes: every rank sends its own
slice across) and hierarchical (uneven nodes: the leaders send everything).
Steps: those of the parts. Bytes across m equal nodes: 2 S (m - 1) / m a node, shared by its ranks; also of 16-bit
floats if nodes have one rank each. Otherwise node sums are sent as float32 and results as 16-bit floats: 3/4 of
float32's bytes. Node sums of 16 bits would be rounded twice: a float16 in [1024, 2048) plus one in [0.5, 1) has
2^20 possible values, and the owner needs the exact one, because its own node's sum may cancel the larger term.
(Sending the originals of two or more ranks takes 32 bits or more, too.)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.arrays.memory_kinds import ALLOCATED
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce, NodeArrays, TwoPhase
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate
from allreduce.errors import OptionError
from allreduce.topology import Topology
from allreduce.transport import cost
from allreduce.transport.control import all_values, together
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.point_to_point import Transfer
from allreduce.transport.shared_segment import Location


class HierarchicalCopy(TwoPhase):
    """Reduces inside nodes by one backend, and across nodes by another.

    node: the backend inside a node, one with the two phases reduce_scatter and all_gather.
    cross: the backend across nodes.
    compress: options (allreduce.wrappers.options): the compression of the messages across nodes. Error feedback is kept
        for sums of a node's ranks.
    make: creates a backend from its name and a topology (given by `create`).
    """

    between_nodes = True

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[..., AllReduce],
        node: str = "shared",
        cross: str = "ring",
        compress: Any = None,
        check: str = "first",
    ) -> None:
        self._make, self._names, self._compress = make, (node, cross), compress
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        make, (node, cross) = self._make, self._names
        inside = self._add_part(topology.inside())
        # a rank that sends nothing across nodes is alone there; it may have to hand over loaded error feedback
        alone = partial(Topology, MPI.COMM_SELF, timeout=topology.timeout, parent=topology)
        across = self._add_part(topology.across() or alone())
        self._node = together(self._comm, lambda: _two_phase(node, self._add_part(make(node, inside))))
        compress = self._compress
        self._cross = together(self._comm, lambda: self._add_part(make(cross, across, compress=compress)))
        # losses and flags are small: the MPI library is good at them
        self._exact = self if compress is None else self._add_part(make("native", topology, check=self.check))
        self.copies_unregistered, self._owners = self._node.copies_unregistered, self._node.hooks.owners
        self._leaders_only = topology.leaders_only
        self._ranks_inside: list[int] = []
        if self._leaders_only:
            self._ranks_inside = all_values(inside.world, self.rank, "learn the ranks of this node")
        self._transfer = Transfer(self._comm, self.workspace, self.tag)

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

    @property
    def exact(self) -> AllReduce:
        return self._exact

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        return self._node.node_arrays(buffer)

    def sent(self, dtype: np.dtype) -> np.dtype:
        return dtype if self._compress is None else self._compress.sent(dtype)

    # Between nodes the state has the names that it has on one node, where this backend is compressed as a whole: jobs
    # with several nodes and with one load each other's.

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        return self._cross.state(array)

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        self._cross.load_state(state, array)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return the slice that a node rank (by default this rank's) owns; all nodes divide the buffer equally."""
        return self._node.owned(length, rank)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return together(self._comm, lambda: self._node.hooks.allocate(length, dtype, device))

    def _memory(self, buffer: np.ndarray) -> int:
        return self._node.hooks.memory(buffer)

    def _locator_for(self, call: Call) -> Locate | None:
        """Compare locations on all ranks: the node's backend does it too, but raises its error only on that node."""
        several = 1 < self.topology.nodes < self.size  # several nodes, and at least one has several ranks
        return self._locate if several and call.memory == ALLOCATED else None

    def _locate(self, buffer: np.ndarray) -> Location | None:
        return self._node.hooks.locate(buffer) if self.topology.nodes < self.size else None

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._reduce_into(buffer, buffer, op)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        """16-bit floats are sent across nodes as they are, except sums of several ranks of a node, sent as float32."""
        sums = buffer
        if dtypes.is_half(buffer.dtype) and not self._originals_cross():
            sums = self.workspace.array("wide", buffer.size, dtypes.TYPES[buffer.dtype].accumulator)
            np.copyto(sums, buffer)
        self._reduce_into(sums, buffer, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        if self._node.size > 1:
            self._node.phases.all_gather(buffer)

    def _originals_cross(self) -> bool:
        """Return True if every node has one rank, so that 16-bit originals are sent, and `cross` can sum them."""
        return self._node.size == 1 and not self._leaders_only and self._cross.sums_half

    def _reduce_into(self, sums: np.ndarray, buffer: np.ndarray, op: Op) -> None:
        """Reduce `sums`, and write this rank's slice, finished and rounded, to `buffer`; both may be one array."""
        if self._node.size > 1:
            if self._compress is not None and op.name in ("sum", "mean"):
                self._cross.hand_over(sums, self._sends(sums.size))
            self._node.phases.reduce_scatter(sums, op.unscaled())
        if self._leaders_only:
            self._through_leader(sums, buffer, op)
        else:
            mine = self.owned(buffer.size)
            self._across(sums[mine], buffer[mine], op)

    def _sends(self, length: int) -> slice:
        """Return the slice of a buffer that this rank sends across nodes. Local."""
        if not self._leaders_only:
            return self.owned(length)
        return slice(0, 0 if self._node.rank else length)

    def _across(self, sums: np.ndarray, part: np.ndarray, op: Op) -> None:
        """All-reduce `sums` across nodes, and write them, finished and rounded, to `part`; both may be one array."""
        cross = self._cross
        if cross.size == 1 or not part.size:
            op.finish(sums)
        elif sums.dtype == part.dtype or not isinstance(cross, TwoPhase):
            cross.hooks.reduce(sums, op)
        else:
            cross.phases.reduce_scatter(sums, op)
            mine = cross.owned(part.size)
            np.copyto(part[mine], sums[mine], casting="unsafe")
            cross.phases.all_gather(part)
            return
        if sums.dtype != part.dtype:
            np.copyto(part, sums, casting="unsafe")

    def _through_leader(self, sums: np.ndarray, buffer: np.ndarray, op: Op) -> None:
        """Uneven nodes: the leader receives its node's slices, all-reduces them across nodes, and sends them back."""
        leader, *others = self._ranks_inside
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


def _two_phase(name: str, backend: AllReduce) -> TwoPhase:
    if not isinstance(backend, TwoPhase):
        raise OptionError(f"node={name!r} can't be used inside nodes: it has no reduce_scatter and all_gather")
    return backend
