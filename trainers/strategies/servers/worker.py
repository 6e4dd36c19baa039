"""A worker of several ranks: they divide its rows and average their gradients; one of them speaks with the servers."""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.transport.control import combine
from allreduce.transport.wait import wait_for
from trainers.backends import backend_for
from trainers.stopwatch import Stopwatch
from trainers.strategies.servers.mailbox import Header

Workers = tuple[tuple[int, ...], ...]
"""The ranks of each worker, in order. The first rank of a worker is its leader."""


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
        """Return memory for the flat gradients, which `reduce` sums without a copy, and for the flat parameters.
        backend: the name of the backend that sums."""
        assert self._topology is not None
        self._backend = backend_for(backend, self._topology, "replicated")
        self._gradients = self._backend.allocate(length, dtype, device="cpu")
        self._sum = self._backend.bind(self._gradients, "sum")
        self._parameters = np.zeros(length, dtype)
        return self._gradients, self._parameters

    def reduce(self) -> None:
        """Sum the gradients over the ranks, in place."""
        if self.size > 1:
            self._clock.start()
            self._sum()
            self._clock.stop()

    def share_parameters(self) -> None:
        """Give all ranks the leader's parameters."""
        if self._backend is not None:
            self._clock.start()
            self._backend.broadcast(self._parameters)
            self._clock.stop()

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
