"""What strategies with servers share: which ranks serve, where parameters and gradients lie, how a state gets whole."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.arrays.chunks import chunk
from allreduce.engine.queue import Future, Queue, Worker
from allreduce.errors import RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.chunked import pieces
from allreduce.transport.control import known, together
from allreduce.transport.wait import wait_for
from trainers import malloc, stopwatch
from trainers.checks import LEARNING_RATES
from trainers.data import Batches
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica
from trainers.state.adopt import Piece, mirror, newest
from trainers.strategies.interface import FLAGS, Strategy, replica_refusal
from trainers.strategies.servers.mailbox import (
    Client,
    Mailbox,
    Waits,
)
from trainers.watching.meter import Tally


class Counts:
    """behind: how many applied gradients were 0, 1, 2, ... updates behind. dropped: how many were not applied.

    cut_short: whether the epoch was ended before its last step.
    """

    def __init__(self) -> None:
        self.behind: list[int] = []
        self.dropped = 0
        self.cut_short = False


class Shard:
    """The slice `part` of a replica's flat parameters, which this rank alone updates.

    parameters, gradients: the whole flat buffers that the replica is bound to.
    version: how many updates it has had.
    """

    def __init__(self, replica: Replica, parameters: np.ndarray, gradients: np.ndarray, part: slice) -> None:
        self._replica, self.part = replica, part
        self.parameters, self.gradients = parameters[part], gradients[part]
        self._accumulator = dtypes.TYPES[self.gradients.dtype].accumulator
        self.version = 0

    def apply(self, gradients: np.ndarray, factor: float) -> None:
        """One update, with the learning rate times `factor`."""
        self.gradients[:] = gradients
        self.update(factor)

    def update(self, factor: float = 1.0) -> None:
        """The same with the gradients that lie in the bound buffer.

        The rate is changed, not the gradients, because Adam and its like take no notice of how large those are.
        """
        replica = self._replica
        rates = replica.learning_rates
        if factor != 1.0:
            replica.learning_rates = [rate * factor for rate in rates]
        try:
            replica.update(self.part)
        finally:
            if factor != 1.0:
                replica.learning_rates = rates
        replica.refresh()
        self.version += 1

    def add_up(self, summands: Sequence[np.ndarray], share: float = 1.0) -> None:
        """Leave the sum of slices, divided by `share`, in the bound buffer; 16-bit floats are summed in float32."""
        total = self.gradients
        if total.dtype != self._accumulator:
            total = np.zeros(total.size, self._accumulator)
        np.copyto(total, summands[0])
        for summand in summands[1:]:
            total += summand
        if share != 1.0:
            total /= total.dtype.type(share)
        if total is not self.gradients:
            self.gradients[:] = total.astype(self.gradients.dtype)

    def is_finite(self) -> bool:
        """Whether all parameters are numbers."""
        return bool(np.isfinite(self.parameters).all())


class Served(Strategy):
    """Servers hold the parameters, each a slice of the flat array; workers compute.

    servers: the ranks that hold the parameters, in the order of their slices. workers: the ranks that compute.
    mails: whether servers take messages in any order, by mailboxes.
    measures: how many numbers travel beside gradients and parameters.
    thread: what a thread beside this rank's own is for: "" for nothing, "ask" for parameters while this rank computes
        (which can wait until it has computed), or "serve" while it does.
    """

    mirrors = "epoch"
    mails = True
    thread = ""

    def __init__(self, replica: Replica, name: str, measures: int) -> None:
        super().__init__(replica, name)
        self.servers: tuple[int, ...] = ()
        self.workers: tuple[int, ...] = ()
        self._measures = measures
        self._connected = False  # the ends of the messages are made
        self._mailbox: Mailbox | None = None
        self._client: Client | None = None
        self._shard: Shard | None = None
        self._queue: Queue | None = None
        self._parameters = self._gradients = np.empty(0)

    # Its making

    def refusal(self, ranks: Topology, goes_on: bool) -> Exception | None:
        replica = self.replica
        if error := replica_refusal(replica, self):
            return error
        if refused := self._refused(ranks):
            return refused
        if replica.device != "cpu":
            return ArgumentError(f"{self.describe()} works on the CPU, and this replica is on {replica.device}")
        if replica.tables:
            what = f"this {type(replica).__name__} has sparse gradients (of its {replica.tables[0].name})"
            return ArgumentError(
                f"{what}, which servers have no place for; use MirroredTrainer or CentralStorageTrainer"
            )
        return None

    def _refused(self, ranks: Topology) -> Exception | None:
        """What is wrong with the arguments of this kind of strategy on these ranks. Local."""
        raise NotImplementedError

    def _assign(self, ranks: int) -> None:
        """Set `servers` and `workers`. Local."""
        raise NotImplementedError

    def _take_part(self) -> None:
        """Set `part` and `parts`. Local."""
        raise NotImplementedError

    def _agree_on_progress(self) -> None:
        """All ranks come to where the servers are, after a failure. Collective."""
        raise NotImplementedError

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        replica, self._connected = self.replica, False
        if replica.allocates:
            malloc.keep_freed_memory()
        self._assign(group.size)
        self.measured = np.zeros(len(replica.metrics) + len(FLAGS))
        length = replica.gradient_length
        self._dtype = dtypes.parse(replica.gradient_dtype)
        self._gradients, self._parameters = (np.zeros(length, self._dtype) for _ in range(2))
        self._slices = [chunk(length, len(self.servers), number) for number in range(len(self.servers))]
        self._shard = None
        mirror(self, whole=False)
        together(group.comm, self._bind)
        self._make_ends()

    def _bind(self) -> None:
        try:
            self.replica.bind_parameters(self._parameters)
        except ArgumentError as error:
            raise ArgumentError(
                f'{self.name} updates slices of the parameters, as MirroredTrainer does with update="sharded", and '
                f"this model or its optimizer can't: {error}"
            ) from error
        self.replica.bind(self._gradients)

    def _make_ends(self) -> None:
        """Make this rank's thread and its ends of the messages. Collective."""
        topology, rank = self.group.topology, self.group.rank
        self._queue = self._make_queue() if self.thread else None
        self._take_part()
        self._messages: MPI.Intracomm = topology.private()
        self._waits = Waits(topology, self.clock)
        self._waits_beside = Waits(topology, stopwatch.make("cpu"))  # what computing hides does not count
        if rank in self.servers:
            part = self._slices[self.servers.index(rank)]
            if self._shard is None:
                self._shard = Shard(self.replica, self._parameters, self._gradients, part)
            length = part.stop - part.start
            waits = self._waits_beside if self.thread == "serve" else self._waits
            if self.mails:
                self._mailbox = Mailbox(self._messages, waits, self.workers, self._measures, length, self._dtype)
        if self.mails and rank in self.workers:
            ends = self._messages, self._waits, self._waits_beside
            self._client = Client(*ends, self.servers, self._slices, self._measures, self._dtype)
        self._connected = True

    def _make_queue(self) -> Queue:
        """Calls here wait for other ranks' calls of another kind, so nobody else's may have to wait for them."""
        name = f"parameters of {self.name}"
        self._beside = self.group.topology.duplicate()
        try:
            return self._beside.once(Worker).queue(name, threaded=True, alone=True)
        except UnavailableError:  # on all ranks
            if self.thread != "ask":
                self._beside.close()
                raise
            return self._beside.once(Worker).queue(name, alone=True)

    def close(self) -> None:
        if not self._connected:
            return
        state = self.whole(self.replica.state())
        for end in (self._mailbox, self._client):
            if end is not None:
                end.close()
        if self._queue is not None:
            self._queue.close()
            self._beside.close()
        self._leave_replica(state)
        self._waits.forget()
        self._waits_beside.forget()
        self.group.topology.release(self._messages)

    def abandon(self) -> None:
        for end in (self._mailbox, self._client):
            if end is not None:
                end.abandon()
        if self._gradients.size:
            self._leave_replica(None)

    def _leave_replica(self, state: dict[str, np.ndarray] | None) -> None:
        """Leave nothing that messages still use in the replica. Local."""
        self.replica.bind(np.zeros_like(self._gradients))
        self.replica.bind_parameters(np.empty_like(self._parameters))
        if state is not None:
            self.replica.load_state(state)
        self._mailbox = self._client = self._shard = None

    # When a rank has failed

    def rescue(self) -> None:
        for end in (self._mailbox, self._client, self._queue):
            if end is not None:
                end.abandon()
        self._mailbox = self._client = self._queue = None

    @property
    def _lost(self) -> str:
        """Why no training can go on with the ranks that are left; "" when it can. Local, the same on all ranks."""
        if len(self.servers) < len(self._slices):
            return "a server was lost, and with it its slice of the parameters and of the optimizer's state"
        return "" if self.workers else "all workers were lost, and servers do not compute"

    def rebuild(self) -> None:
        now = {old: rank for rank, old in enumerate(self.group.previous)}
        self.servers = tuple(now[rank] for rank in self.servers if rank in now)
        self.workers = tuple(now[rank] for rank in self.workers if rank in now)
        if not self._lost:
            self._make_ends()

    def restore(self) -> bool:
        """All ranks take on what the servers have. RankLostError on all ranks when no training can go on from it."""
        if self._lost:
            text = f"{self._lost}; go on from the last checkpoint (resume=True, --resume)"
            raise known(RankLostError(text), self.group.comm)
        self._agree_on_progress()
        own = []
        if self._shard is not None:
            part = self._shard.part
            own = [Piece(0, 0, part.start, part.stop, {"parameters": self._shard.parameters}, {})]
        found = newest(self.group.comm, own, self._parameters.size)
        assert found is not None
        self._parameters[:] = found.state["parameters"]
        self.replica.refresh()
        return True

    # Steps and epochs

    @property
    def fresh_gradients(self) -> Any:
        return None if self.part is None else self._gradients

    def meter(self, batches: Batches) -> Any:
        self._tally = Tally(self.replica.metrics)
        return self._tally

    def _collect_tally(self) -> None:
        """Add up what the ranks have measured in an epoch. Collective; DivergedError when it is no number."""
        self._tally.collect(self.group.comm, self._shard is None or self._shard.is_finite())

    def _spread(self) -> None:
        """Give all ranks the parameters of the servers. Collective."""
        for server, part in zip(self.servers, self._slices, strict=True):
            for piece in pieces(self._parameters[part]):
                request = self.group.comm.Ibcast(piece, server)
                self._waits.all_of([request], "get the parameters of the servers")
        self.replica.refresh()

    def _logs_of(self, counts: Counts) -> dict[str, Any]:
        """What the first server has counted in an epoch, as logs. Collective."""
        sizes = np.array([len(counts.behind), counts.dropped, counts.cut_short], np.int64)
        self._take_numbers(sizes)
        behind = np.zeros(sizes[0], np.int64)
        if self.group.rank == self.servers[0]:
            behind[:] = counts.behind
        self._take_numbers(behind)
        self.cut_short = bool(sizes[2])
        return {"staleness": behind.tolist(), "dropped": int(sizes[1])}

    def _take_numbers(self, numbers: np.ndarray) -> None:
        """Take on those of the first server. Collective."""
        wait_for(
            self.group.comm, self.group.comm.Ibcast(numbers, self.servers[0]), "hear what the first server has counted"
        )

    def apart(self) -> dict[str, str]:
        return dict.fromkeys([*self.replica.updated, LEARNING_RATES], "the servers have them")

    def whole(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What updates change is right on the servers: slices are collected from all, the rest from the first."""
        result = dict(state)
        for name in sorted({"parameters", *self.replica.updated}):
            array = result[name] = np.array(state[name], order="C")
            if name == "parameters" or name in self.replica.elementwise:
                owned = [array[slice(*part.indices(array.size)[:2])] for part in self._slices]
            else:
                owned = [array]
            for server, part in zip(self.servers, owned, strict=False):
                for piece in pieces(part):
                    self._waits.all_of([self._messages.Ibcast(piece, server)], "get the state that servers have")
        return result


@contextmanager
def ended(beside: Future) -> Iterator[None]:
    """A failed rank that is met inside is raised when the call in the other thread has ended, which hears of it too."""
    try:
        yield
    except RankLostError:
        with suppress(Exception):
            beside.wait()
        raise
