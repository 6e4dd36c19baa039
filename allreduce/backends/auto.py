"""Auto: selects a backend for each call, by a measured table if this machine has one, else by a built-in rule."""

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce import notices
from allreduce.arrays import dtypes
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce, NodeArrays
from allreduce.backends.decision_table import Rule, rule_for
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Trial, Work
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.shared_segment import STAGING_BYTES

# Measured with Open MPI 5 and MPICH 5 on a 2-core EPYC, 2 to 4 ranks; used in `rule`.
SMALL_BYTES = 64 * 1024
SHARED_BYTES_PER_RANK = 64 * 1024
SMALL = "native"  # for arrays below SMALL_BYTES
LAST_RESORT = "ring"  # needs nothing but messages


def rule(topology: Topology, nbytes: int, dtype: np.dtype, memory: int) -> tuple[str, str]:
    """Return (backend name, reason) for a call. Depends on the arguments only, so all ranks select the same. Local."""
    if memory == GPU:
        return "nccl", "CuPy arrays"
    half = dtypes.is_half(dtype)
    if topology.nodes > 1:
        if nbytes < SMALL_BYTES and not half:
            return "native", f"below {_size(SMALL_BYTES)} the MPI library's latency wins"
        return "hierarchical_copy", f"{topology.nodes} nodes"
    if half:
        return "shared", "16-bit floats are summed in float32 while they are in the cache"
    least, most = SHARED_BYTES_PER_RANK * topology.size, STAGING_BYTES // topology.size
    if nbytes < least:
        return "native", f"below {_size(least)} the MPI library's latency wins"
    if memory == ALLOCATED:
        return "shared", "one node: the ranks reduce in the memory that they share"
    if topology.cma.works:
        return "shared", "one node: the ranks reduce in each other's memory"
    if nbytes <= most:
        return "shared", f"arrays not from allocate(), up to {_size(most)}: staged in memory that the ranks share"
    return "ring", f"arrays not from allocate(), above {_size(most)}: no staging, each byte is copied once"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def allocator(topology: Topology) -> str:
    """Return the name of the backend that allocates. Local."""
    return "hierarchical_copy" if topology.nodes > 1 else "shared"


class Auto(AllReduce):
    """Selects a backend for each call, creates it at its first use, and forwards the call to it.

    A backend that does not work here is replaced, with one notice: on the GPU by staging through the host, elsewhere by
    LAST_RESORT.

    make: creates a backend from its name and a topology; names: of all backends (both from `create`).
    table: the path of a decision table from `python -m benchmarks.tune`; by default the one in
        $ALLREDUCE_TABLE, else this machine's in the user's cache folder. "" for none.
    choose: a rule to use instead of any table.
    compress: options (allreduce.wrappers.options), on several nodes: the compression of the messages between them.
        Arrays that go to the MPI library (the small ones) are not compressed.
    """

    between_nodes = True

    def __init__(
        self,
        topology: Topology,
        *,
        make: Callable[..., AllReduce],
        names: Collection[str],
        table: str | os.PathLike[str] | None = None,
        choose: Rule | None = None,
        compress: Any = None,
        check: str = "first",
    ) -> None:
        if choose is not None and not callable(choose):
            raise OptionError(f"choose must be a function of (topology, nbytes, dtype, memory), got {choose!r}")
        self._make, self._names, self._rule, self._table, self._compress = make, names, choose, table, compress
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        # Parts are created during calls, in any thread, so they have a separate topology.
        self._parts_topology = self._add_part(topology.duplicate())
        self._choose = self._rule or rule_for(self._comm, topology, self._table, rule, self._names)
        self._made: dict[str, AllReduce] = {}
        self._unavailable: dict[str, str] = {}
        self._allocator: AllReduce | None = None  # the part whose memory `allocate` gives
        self._exact = self if self._compress is None else self._add_part(self._make(SMALL, topology, check=self.check))

    @property
    def exact(self) -> AllReduce:
        return self._exact

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        return None if self._allocator is None else self._allocator.node_arrays(buffer)

    def sent(self, dtype: np.dtype) -> np.dtype:
        return dtype if self._compress is None else self._compress.sent(dtype)

    def choice(self, length: int, dtype: DTypeLike = "float32", device: str = "cpu") -> tuple[str, str]:
        """Return (backend name, reason) for an array from `allocate`. Local, from any thread.

        A backend that no call has used yet may still turn out to be unavailable.
        """
        parsed = dtypes.parse(dtype)
        return self._decide(length * parsed.itemsize, parsed, GPU if device == "cuda" else ALLOCATED, self._made.get)

    def chosen(self, array: Any) -> str:
        if array.size == 0 or self.size == 1:
            return self.name
        return self._decide(array.nbytes, array.dtype, self._memory_kind(array), self._made.get)[0]

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cuda":
            if self.size > 1:  # `choice` then knows whether the backend works
                self._decide(length * dtype.itemsize, dtype, GPU, self._part)
            return super()._allocate(length, dtype, device)
        name = allocator(self.topology)
        part = self._part(name)
        if part is not None:
            try:
                array = part.hooks.allocate(length, dtype, device)
                self._allocator = part
                self._owners = part.hooks.owners
                self.__dict__.pop("hooks", None)  # drop the cached Hooks, which have the previous owners
                return array
            except UnavailableError as error:
                notices.once(self.rank, f'"auto" allocates ordinary memory, so "{name}" will copy: {error}')
        return super()._allocate(length, dtype, device)

    def _memory(self, buffer: np.ndarray) -> int:
        return UNREGISTERED if self._allocator is None else self._allocator.hooks.memory(buffer)

    def _route(self, call: Call) -> Work | Trial:
        if call.length == 0 or self.size == 1:
            return super()._route(call)
        name, _ = self._decide(call.length * call.dtype.itemsize, call.dtype, call.memory, self._part)
        if call.memory == GPU and name == LAST_RESORT:
            return super()._reduce_gpu  # copies to the host, where _reduce decides again
        part = self._made[name]
        return Trial(partial(self._try, part, part.hooks.route(call), call))

    def _try(self, part: AllReduce, work: Work | Trial, call: Call, buffer: Any, op: Op) -> Work | Trial:
        """Do `work`. If it raises UnavailableError, mark `part` as unavailable, and use another backend.

        Returns the work for later calls.
        """
        try:
            work(buffer, op)
        except UnavailableError as error:  # raised on all ranks, before anything was changed
            self._mark_unavailable(part.name, error)
            self._known.clear()
            work = self._route(call)
            work(buffer, op)
        return work

    def _locator_for(self, call: Call) -> Locate | None:
        if call.length == 0 or self.size == 1 or call.memory == GPU:
            return None
        name, _ = self._decide(call.length * call.dtype.itemsize, call.dtype, call.memory, self._part)
        return self._made[name].hooks.locator_for(call)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._route(Call("all_reduce", buffer.size, buffer.dtype, op.name, self._memory(buffer)))(buffer, op)

    def _decide(
        self, nbytes: int, dtype: np.dtype, memory: int, find: Callable[[str], AllReduce | None]
    ) -> tuple[str, str]:
        """Return (backend name, reason). find: `_part`, which creates a backend, or a local look-up of created ones."""
        name, why = self._choose(self.topology, nbytes, dtype, memory)
        part = find(name)
        if part is not None and dtypes.is_half(dtype) and not part.sums_half:
            name, why = rule(self.topology, nbytes, dtype, memory)  # from a table that was edited by hand
            find(name)
        if name in self._unavailable:
            name, why = LAST_RESORT, f'"{name}" can\'t be used here: {self._unavailable[name]}'
            find(name)
        return name, why

    def _part(self, name: str) -> AllReduce | None:
        """Return the backend `name`, created at its first use (collective then); None if it is unavailable."""
        if name not in self._made and name not in self._unavailable:
            try:
                compress = None if name == SMALL else self._compress
                self._made[name] = self._add_part(self._make(name, self._parts_topology, compress=compress))
            except UnavailableError as error:
                self._mark_unavailable(name, error)
        return None if name in self._unavailable else self._made[name]

    def _mark_unavailable(self, name: str, error: UnavailableError) -> None:
        self._unavailable[name] = str(error)
        notices.once(self.rank, f'"auto" does not use "{name}": {error}')
