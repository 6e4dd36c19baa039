"""Hierarchical copy: reduce inside each node, all-reduce across the nodes, copy inside each node.

After TensorFlow's HierarchicalCopyAllReduce and ChainerMN's two_dimensional (equal nodes: every local
rank carries its own slice across) and hierarchical (uneven nodes: the leaders carry everything).
Steps: those of the parts. Bytes across m equal nodes: 2 S (m - 1) / m a node, shared by its ranks; of 16-bit floats
too where nodes have one rank each. Otherwise node sums go across as float32 and results come back as they are: 3/4 of
float32's bytes. With half of them, 16 bits, a sum can't be rounded once, at the end: two float16, one of [1024, 2048)
and one of [0.5, 1), have 2^20 different sums, and the owner must tell them all apart, because what its own node brings
may take the larger one away. (The originals of two ranks are 32 bits too, and those of more ranks are more.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.memory_kinds import ALLOCATED
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce, TwoPhase
from allreduce.engine.call import Call
from allreduce.engine.engine import Find
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, together
from allreduce.transport.point_to_point import Transfer


class HierarchicalCopy(TwoPhase):
    """Composed of two backends.

    node: the backend inside a node, one with the two phases reduce_scatter and all_gather.
    cross: the backend across nodes.
    make: creates a backend from its name and a topology (given by `create`).
    """

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[[str, Topology], AllReduce],
        node: str = "shared",
        cross: str = "ring",
        check: str = "first",
    ) -> None:
        self._make, self._names = make, (node, cross)
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        make, (node, cross) = self._make, self._names
        inside, across = self._keep(topology.inside()), topology.across()
        if across:
            self._keep(across)
        try:
            self._node = together(self._comm, lambda: _two_phase(node, self._keep(make(node, inside))))
            self._cross = together(self._comm, lambda: self._keep(make(cross, across)) if across else None)
        except AllReduceError:  # on all ranks, so they can close together
            self.close()
            raise
        self.copies_foreign = self._node.copies_foreign
        self._leaders_only = topology.leaders_only
        self._ranks_inside: list[int] = []
        if self._leaders_only:
            self._ranks_inside = all_values(inside.world, self.rank, "learn the ranks of this node")
        self._transfer = Transfer(self._comm, self.workspace, self.tag)

    def owned(self, length: int, rank: int | None = None) -> slice:
        """This rank's share of the buffer among the ranks of its node; nodes hold the same. rank: a node rank."""
        return self._node.owned(length, rank)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return together(self._comm, lambda: self._node.hooks.allocate(length, dtype, device))

    def _memory(self, buffer: np.ndarray) -> int:
        return self._node.hooks.memory(buffer)

    def _finding(self, call: Call) -> Find | None:
        """The backend inside of a node compares places too, but what it finds is an error of that node alone."""
        several = 1 < self.topology.nodes < self.size  # and one of them has several ranks
        return self._node.hooks.place if several and call.memory == ALLOCATED else None

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._reduce_into(buffer, buffer, op)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        """16-bit floats cross the network as such, but for the sums of several ranks of a node."""
        sums = buffer
        if dtypes.is_half(buffer.dtype) and not self._originals_cross():
            sums = self.workspace.array("wide", buffer.size, dtypes.TYPES[buffer.dtype].accumulator)
            np.copyto(sums, buffer)
        self._reduce_into(sums, buffer, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        if self._node.size > 1:
            self._node.phases.all_gather(buffer)

    def _originals_cross(self) -> bool:
        """True where what goes across are no sums, but what the ranks brought, and the other side can sum that."""
        return self._node.size == 1 and not self._leaders_only and self._cross is not None and self._cross.sums_half

    def _reduce_into(self, sums: np.ndarray, buffer: np.ndarray, op: Op) -> None:
        """Reduce `sums`, and leave what this rank owns of it, finished and rounded, in `buffer`; it may be the same."""
        if self._node.size > 1:
            self._node.phases.reduce_scatter(sums, op.unscaled())
        if self._leaders_only:
            self._through_leader(sums, buffer, op)
        else:
            mine = self.owned(buffer.size)
            self._across(sums[mine], buffer[mine], op)

    def _across(self, sums: np.ndarray, part: np.ndarray, op: Op) -> None:
        """All-reduce `sums` across nodes, and finish and round them in `part`, which may be the same."""
        cross = self._cross
        if cross is None or cross.size == 1 or not part.size:
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
        """Uneven nodes: the leader collects the slices of its node, carries them across, and hands them back."""
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
