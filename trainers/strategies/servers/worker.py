"""A worker of several ranks: they divide its rows and average their gradients; one of them speaks with the servers."""

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.transport.control import combine
from allreduce.transport.wait import wait_for
from trainers.backends import backend_for
from trainers.state.owners import NodeMemory
from trainers.stopwatch import Stopwatch
from trainers.strategies.servers.mailbox import Header

Workers = tuple[tuple[int, ...], ...]
"""The ranks of each worker, in order. The first rank of a worker is its leader."""


def divide(ranks: Sequence[int], nodes: Sequence[int], size: int) -> Workers:
    """Divide `ranks` into workers of `size` ranks each; at most one worker is smaller. Local.

    Each node gets as many whole workers as fit. The ranks that remain form workers that span nodes. The workers are
    sorted by their first ranks. nodes: the node of each rank of the group.
    """
    of_node: dict[int, list[int]] = {}
    for rank in ranks:
        of_node.setdefault(nodes[rank], []).append(rank)
    rest: list[int] = []
    workers: list[tuple[int, ...]] = []
    for here in of_node.values():
        whole = len(here) // size * size
        workers += _cut(here[:whole], size)
        rest += here[whole:]
    return tuple(sorted(workers + _cut(rest, size)))


def _cut(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(sorted(ranks[first : first + size])) for first in range(0, len(ranks), size)]


def uneven_text(workers: Workers, nodes: Sequence[int], size: int) -> str:
    """Return a notice about workers that are smaller than `size` or span nodes, as text; "" if there are none."""
    small = [ranks for ranks in workers if len(ranks) < size]
    wide = [ranks for ranks in workers if len({nodes[rank] for rank in ranks}) > 1]
    texts = [f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'} a smaller worker" for ranks in small]
    texts += [f"the worker of {_named(ranks)} spans nodes, which is slower" for ranks in wide]
    return f"ranks_per_worker={size}: {'; '.join(texts)}" if texts else ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class WorkerRanks:
    """The ranks of this rank's worker. Methods are collective over these ranks unless they say "Local".

    topology: of these ranks, the leader first; closed with this object. None if every worker has one rank.
    size: the number of ranks. place: this rank's place among them; the leader has place 0.
    halts: whether a rank of the worker has asked to end the epoch. dealt: the header of the servers' last reply.
    """

    def __init__(self, clock: Stopwatch, topology: Topology | None = None) -> None:
        self._clock, self._topology = clock, topology
        self._backend: AllReduce | None = None
        self._sum: Callable[[], object] = lambda: None  # sums `_gradients`
        self._node: NodeMemory | None = None  # of the parameters
        self._gradients = self._parameters = np.empty(0)
        self.size, self.place = (1, 0) if topology is None else (topology.size, topology.rank)
        # two threads communicate at the same time
        self._comm, self._ahead = (MPI.COMM_SELF if topology is None else topology.private() for _ in range(2))
        self.halts, self.dealt = False, Header()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks with the servers. Local."""
        return self.place == 0

    def allocate(self, backend: str, length: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return memory for the flat gradients, which `reduce` sums without a copy, and for the flat parameters. On one
        node the ranks share the memory of the parameters. backend: the name of the backend that sums."""
        assert self._topology is not None
        self._backend = backend_for(backend, self._topology, "replicated")
        self._gradients = self._backend.allocate(length, dtype, device="cpu")
        self._sum = self._backend.bind(self._gradients, "sum")
        owned, name = length if self.leads else 0, str(dtype)
        self._node = NodeMemory(self._topology, self._comm, owned, length, {name: length}, "cpu")
        self._parameters = self._node.arrays[name] if self._node.arrays else np.zeros(length, dtype)
        return self._gradients, self._parameters

    def reduce(self) -> None:
        """Sum the gradients over the ranks, in place."""
        if self.size > 1:
            self._clock.start()
            self._sum()
            self._clock.stop()

    def share_parameters(self) -> None:
        """Give all ranks the parameters that the leader has written into its memory."""
        if self.size == 1:
            return
        self._clock.start()
        if self._node is not None and self._node.arrays:
            self._node.fence()
        elif self._backend is not None:
            self._backend.broadcast(self._parameters)
        self._clock.stop()

    def fence(self) -> None:
        """Wait until all ranks have written to parameters that they share."""
        if self._node is not None:
            self._node.fence()

    def announce(self, reply: Header) -> None:
        """Set `dealt` on all ranks to the servers' reply to the leader; other ranks' `reply` is ignored. For the second
        thread."""
        dealt = np.array(reply, np.int64)
        if self.size > 1:
            wait_for(self._ahead, self._ahead.Ibcast(dealt), "learn the next part of the worker")
        self.dealt = Header(*dealt.tolist())

    def meet(self, halts: bool) -> Header:
        """Return `dealt` once all ranks have finished the last part, and set `halts`.

        halts: whether this rank asks to end the epoch.
        """
        found = np.array([halts], np.int64)
        self._combine(found, "begin the next part of the worker")
        self.halts = bool(found[0])
        return self.dealt

    def settle(self, computed: bool, halts: bool, measured: np.ndarray) -> bool:
        """Return whether all ranks have computed their share of a part. Sums `measured` over the ranks, in place, and
        sets `halts`.

        computed: whether this rank has gradients. halts: whether it asks to end the epoch. measured: its metrics,
        weighted by its share of the part's rows.
        """
        sums = np.array([*measured, not computed, halts], np.float64)
        self._combine(sums, "add up the metrics of a part")
        measured[:] = sums[:-2]
        self.halts = bool(sums[-1])
        return not sums[-2]

    def _combine(self, numbers: np.ndarray, what: str) -> None:
        if self.size > 1:
            self._clock.start()
            combine(self._comm, numbers, what)
            self._clock.stop()

    def close(self) -> None:
        """Free everything. The memory of `allocate` must not be in use."""
        self.abandon()
        if self._topology is not None:
            self._topology.close()

    def abandon(self) -> None:
        """Drop the memory; the topology that contains this one drops the rest. Local."""
        self._gradients = self._parameters = np.empty(0)
        self._sum = lambda: None
        self._node = None
