"""Algorithm: the interface of an all-reduce algorithm. No user calls it, and it checks nothing.

AllReduce (backend.py) checks the arguments of a call, the ranks compare the call, and then an algorithm does it. So an
algorithm holds messages and arithmetic alone. An algorithm may hold others, which it makes in its constructor by
`context.make`: "auto" selects one of them for each call, "hierarchical_copy" has one inside the nodes and one across
them, and a compression has one for its messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import casts, chunks, gpu, ops
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.workspace import zeros
from allreduce.call.call import Call
from allreduce.call.executor import Executor, Work
from allreduce.errors import OptionError
from allreduce.memory.allocations import Allocations
from allreduce.topology import Topology
from allreduce.transport import chunked, cost
from allreduce.transport.cma import CMA
from allreduce.transport.control import on_all_ranks
from allreduce.transport.layout import NodeLayout


class Context:
    """The ranks of an algorithm, and the memory and the communicator with which it works. The constructor is local.

    comm: the communicator of these ranks, for the algorithm's messages alone. layout: which of them run on which node.
    topology: of all ranks of the user; these ranks may be fewer (see `inside`, `across`). executor: it runs the user's
    calls, and the node's ranks meet in it. allocations: the arrays from `allocate`, and the state of compressions.
    """

    def __init__(
        self,
        topology: Topology,
        comm: MPI.Intracomm,
        layout: NodeLayout,
        executor: Executor,
        allocations: Allocations,
        create: Callable[..., "Algorithm"],
    ) -> None:
        self.topology, self.comm, self.layout = topology, comm, layout
        self.rank, self.size = comm.rank, comm.size
        self.executor, self.allocations, self._create = executor, allocations, create
        self.making: list[tuple] = []  # the algorithms whose constructors run now, the outermost first
        self.tag = executor.tag
        self._pinned = executor.scratch(gpu.pinned)

    @property
    def cma(self) -> CMA:
        """Access to the memory of the node's ranks."""
        return self.topology.cma

    def make(self, name: str, **options: Any) -> "Algorithm":
        """Return a new algorithm on these ranks. Collective. Raises the errors of allreduce.create, and OptionError for
        an algorithm that makes itself, which would never end."""
        made = name, self.size, options
        if made in self.making:
            inner = " makes ".join(repr(each) for each, *_ in [*self.making[self.making.index(made) :], made])
            raise on_all_ranks(
                OptionError(f"{inner}, without end: an algorithm can't hold itself. Make another one inside"), self.comm
            )
        self.making.append(made)
        try:
            return self._create(name, self, **options)
        finally:
            self.making.pop()

    @property
    def node_rank(self) -> int:
        """This rank's number among the ranks here that are on its node."""
        return self.layout.members[self.layout.node_of(self.rank)].index(self.rank)

    def inside(self) -> "Context":
        """Return the context of this node's ranks. Collective."""
        layout = self.layout
        ranks = self.comm if layout.nodes == 1 else self.topology.node
        comm = self.executor.communicator(ranks, alone=layout.nodes == layout.size)
        return self._with(comm, [comm.size])

    def across(self) -> "Context":
        """Return the context of one rank of each node. Collective.

        Equal nodes: the ranks with this rank's node rank. Uneven nodes: the leaders; each other rank is alone.
        """
        layout = self.layout
        ranks = self.comm if layout.nodes == layout.size else self.topology.cross
        alone = layout.nodes == 1 or (layout.leaders_only and self.node_rank > 0)
        comm = self.executor.communicator(ranks, alone=alone)
        return self._with(comm, [1] * comm.size)

    def split(self, colour: int) -> "Context":
        """Return the context of the ranks with the same `colour`, each on its node. Collective."""
        comm = self.executor.communicator(self.comm, colour)
        return self._with(comm, [1] * comm.size)

    def stage(self, buffer: Any, read: slice, run: Callable[[np.ndarray], object], written: slice) -> None:
        """Do `run` on a copy of a 1-D CuPy array in pinned host memory.

        read: the part of the array that is copied to the host before `run`. written: the part that is copied back.
        """
        host = self._pinned.array("staged", buffer.size, buffer.dtype)
        buffer[read].get(out=host[read])  # waits for the current stream, so the GPU has finished writing
        run(host)
        buffer[written].set(host[written])
        gpu.synchronize()  # the host memory is used again in the next call

    def _with(self, comm: MPI.Intracomm, sizes: Sequence[int]) -> "Context":
        layout = NodeLayout.of_sizes(sizes)
        context = Context(self.topology, comm, layout, self.executor, self.allocations, self._create)
        context.making = self.making
        return context


class Algorithm(ABC):
    """All-reduces 1-D arrays over the ranks of a context. Creating one is collective, and so are its methods, but
    `owned`, `work`, `cost`, `abandon` and others that say "Local".

    The constructor makes everything that depends on the ranks, inner algorithms too. Raises UnavailableError or
    OptionError, on all ranks.
    """

    sums = True  # False: it has only its own operation (adasum), and can't average gradients
    sums_half = True  # False: float16 and bfloat16 raise UnsupportedDtypeError
    by_array = False  # True: each array of a tree is reduced separately, not all in one buffer
    one_node = False  # True: all ranks must be on one node
    needs_gpu = False  # True: a GPU for each rank is needed
    between_nodes = False  # True: takes `compress`, and compresses only messages between nodes (on several nodes)
    two_phase = False  # True: it is a TwoPhase
    sums_terms = False  # True: it does sum_terms
    dense_rows = False  # True: sparse sums are reduced as dense arrays
    copies_unregistered = ""  # the notice for arrays not from `allocate`, if they are copied; "" if they are not

    lossless: "Algorithm"  # the algorithm for values that must not be rounded: this one, unless it compresses

    def __init__(self, context: Context) -> None:
        self.context, self.lossless = context, self
        self.rank, self.size, self.comm = context.rank, context.size, context.comm
        self.workspace = context.executor.scratch()
        self.holds: list[Algorithm] = []  # the algorithms inside, which `close` and `abandon` reach

    @abstractmethod
    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce a 1-D NumPy array in place. There are at least 1 element and 2 ranks.

        Afterwards all ranks hold the same bits, and `op.finish` was applied to each element once.
        """

    def all_gather(self, buffer: np.ndarray) -> None:
        """Copy every rank's `owned` slice to all ranks; any dtype."""
        chunked.spread(self.comm, buffer, [self.owned(buffer.size, rank) for rank in range(self.size)])

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return the slice of a buffer of `length` elements that `rank` owns (default: this rank). Local."""
        return chunks.chunk(length, self.size, self.rank if rank is None else rank)

    def work(self, call: Call, op: Op) -> Work:
        """Return the work of calls like `call`, which runs right after the ranks have met in one. Local.

        AllReduce calls it for a new signature (kind, shape, dtype, op, memory), and for each `bind`.
        """
        everything, mine = slice(None), self.owned(call.length)
        run: Callable[[Any], object] = lambda buffer: self.reduce(buffer, op)  # noqa: E731
        read, written = everything, everything
        if call.kind == "reduce_scatter":
            assert isinstance(self, TwoPhase)
            scatter = self.reduce_scatter
            run, written = (lambda buffer: scatter(buffer, op)), mine
        elif call.kind == "all_gather":
            run, read = self.all_gather, mine
        if call.memory == GPU:
            return Work(lambda buffer: self.context.stage(buffer, read, run, written))
        return Work(run)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        """Return `length` zeros in memory in which the algorithm reduces without a copy."""
        if device != "cuda":
            return zeros(length, dtype)
        gpu.choose_device(self.context.topology.node_rank)
        return gpu.cupy().zeros(length, dtype)

    def resolve(self, op: str, dtype: np.dtype) -> Op:
        """Return the Op named `op` for `dtype`. Raises UnsupportedOpError. Local."""
        return ops.resolve(op, dtype, self.size)

    def choice(self, call: Call) -> tuple[str, str]:
        """Return the name of the algorithm that "auto" selects for a call, and the reason; "" for this one. Local."""
        return "", ""

    @staticmethod
    def cost(nbytes: float, layout: cost.Layout, machine: cost.Machine) -> float:
        """Return the seconds of a call, the same on all ranks, by a formula, which the docstring gives with its source.
        "auto" selects the cheapest of all algorithms that have one; benchmarks.scaling predicts with them. Optional."""
        return float("inf")

    def close(self) -> None:
        """Free what the context does not free: it owns the communicators, the scratch memory and the allocations."""
        for each in self.holds:
            each.close()

    def abandon(self) -> None:
        """Drop what `close` frees, without communicating, because ranks may have failed. Local."""
        for each in self.holds:
            each.abandon()


class TwoPhase(Algorithm):
    """Base class of algorithms that do a reduce_scatter, then an all_gather. Each phase can also be called alone.

    Between the phases each rank holds the result of one slice of the buffer, `owned(length)`.
    """

    two_phase = True

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        self.reduce_scatter(buffer, op)
        self.all_gather(buffer)

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        """Reduce this rank's `owned` slice of a 1-D array in place; other elements are undefined afterwards.

        16-bit floats are sent as float32 sums, and rounded by their owner.
        """
        wide, mine = casts.widened(buffer, self.workspace), self.owned(buffer.size)
        self.scatter(wide, op)
        if wide is not buffer:
            np.copyto(buffer[mine], wide[mine], casting="unsafe")

    @abstractmethod
    def scatter(self, buffer: np.ndarray, op: Op) -> None:
        """As `reduce_scatter`, for dtypes that are summed without another dtype: no 16-bit floats."""

    def in_everyones_array(self, buffer: np.ndarray, run: Callable[[list[np.ndarray]], object]) -> bool:
        """Call `run` with all ranks' arrays like `buffer`, if each rank can read and write them and has the C library.

        `run` begins when all ranks are in this call, and this returns when it has ended on all ranks. Returns whether
        it was called, the same on all ranks.
        """
        return False
