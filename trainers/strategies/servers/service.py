"""What trainers with servers share: who is one, where parameters and gradients lie, and how a state becomes whole."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from allreduce.arrays import dtypes
from allreduce.arrays.chunks import chunk
from allreduce.engine.queue import Future, Queue, Worker
from allreduce.errors import RankLostError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.chunked import pieces
from allreduce.transport.control import everywhere, known, together
from allreduce.transport.wait import wait_for
from trainers import malloc, stopwatch, trainer
from trainers.checks import LEARNING_RATES
from trainers.data import Batches
from trainers.errors import ArgumentError
from trainers.recovery.calls import Survival, refusal
from trainers.replica import Replica
from trainers.strategies.servers.messages import Waits, unit_type
from trainers.strategies.servers.progress import Counts
from trainers.strategies.servers.server import Desk, Shard
from trainers.strategies.servers.worker import Client
from trainers.trainer import Trainer
from trainers.watching.meter import Tally

LOST = "a server was lost, and with it its slice of the parameters and of the optimizer's state"


class ServedTrainer(Trainer):
    """Creating it is collective.

    servers: the ranks that hold the parameters, each the slice of all in their order. workers: the ranks that compute.
    measures: how many numbers travel beside gradients and parameters.
    thread: what the topology's worker is for: "" for nothing, "ask" for parameters while this rank computes (which
        can wait until it has computed), or "serve" while it does. owns_topology: it is closed with this.
    on_failure: "continue" to go on without workers that are lost.
    """

    mirrors = "epoch"

    def __init__(
        self, replica: Replica, topology: Topology, servers: Sequence[int], workers: Sequence[int],
        measures: int, thread: str, owns_topology: bool, on_failure: str | None,
    ) -> None:  # fmt: skip
        self.servers, self.workers = tuple(servers), tuple(workers)
        self._owns_topology = owns_topology
        if replica.allocates:
            malloc.keep_freed_memory()
        dtype = dtypes.parse(replica.gradient_dtype)
        self._gradients = np.zeros(replica.gradient_length, dtype)
        self._parameters = np.zeros(replica.gradient_length, dtype)
        self._slices = [chunk(replica.gradient_length, len(servers), number) for number in range(len(servers))]
        self._desk: Desk | None = None
        self._client: Client | None = None
        self._shard: Shard | None = None
        self._lane: Queue | None = None
        super().__init__(replica, topology)  # from here on a loss abandons this trainer, whatever of it there is
        try:
            self._mirror(whole=False)
            together(self._comm, self._bind)
            self._lane = self._make_lane(thread) if thread else None
        except Exception as error:
            if everywhere(error, self._comm):
                self.topology.release(self._comm, self)
                self.closed = True
                if owns_topology:
                    self.topology.close()
            raise
        self._serves, self._lost_servers = (measures, dtype, thread), 0
        self._take_part()
        self._meet(measures, dtype, thread)
        if ulfm.in_force() and self.size > 1:
            self._survival = Survival(self, goes_on=on_failure == "continue")

    # When a rank was lost

    def _let_go_of_ranks(self) -> None:
        super()._let_go_of_ranks()
        for end in (self._desk, self._client, self._lane):
            if end is not None:
                end.abandon()
        self._desk = self._client = self._lane = None
        self._owns_topology = True  # the one that is made now

    def _renumber(self, arguments: dict[str, Any], former: tuple[int, ...]) -> None:
        servers = arguments.get("servers", 1)
        if isinstance(servers, int):
            arguments["servers"] = min(servers, max(1, len(former) - 1))  # as long as two are left, one is a worker
        else:  # of those that are left; the last rank where none is
            arguments["servers"] = [place for place, rank in enumerate(former) if rank in servers] or 1
        if "spare" in arguments:
            arguments["spare"] = min(arguments["spare"], len(former) - 1)

    def _reconnect(self, topology: Topology) -> None:
        places = {rank: place for place, rank in enumerate(topology.former)}
        self._lost_servers += len(set(self.servers) - set(places))
        self.servers = tuple(places[rank] for rank in self.servers if rank in places)
        self.workers = tuple(places[rank] for rank in self.workers if rank in places)
        super()._reconnect(topology)
        self._take_part()
        if self.workers and not self._lost_servers:
            measures, dtype, thread = self._serves
            self._lane = self._make_lane(thread) if thread else None
            self._meet(measures, dtype, thread)

    def _restore(self) -> bool:
        """All ranks take on what the servers have. RankLostError on all ranks when no training can go on from it."""
        if self._lost_servers:
            raise self._stopped(LOST)
        if not self.workers:
            raise self._stopped("all workers were lost, and servers do not compute")
        self._agree_on_progress()
        self._spread()
        return True

    def _stopped(self, why: str) -> RankLostError:
        """The error that all ranks raise, since nobody can go on."""
        return known(RankLostError(f"{why}; go on from the last checkpoint (resume=True, --resume)"), self._comm)

    def _take_part(self) -> None:
        """Which part of every batch this rank takes. Local."""

    def _agree_on_progress(self) -> None:
        """All ranks come to where the servers are. Collective."""
        raise NotImplementedError

    # What is made for these ranks

    def _bind(self) -> None:
        try:
            self.replica.bind_parameters(self._parameters)
        except ArgumentError as error:
            kind = type(self).__name__
            raise ArgumentError(
                f'{kind} updates slices of the parameters, as MirroredTrainer does with update="sharded", and this '
                f"model or its optimizer can't: {error}"
            ) from error
        self.replica.bind(self._gradients)

    def _make_lane(self, thread: str) -> Queue:
        """Calls here wait for other ranks' calls of another kind, so nobody else's may have to wait for them."""
        name = f"parameters of {type(self).__name__}"
        self._beside = self.topology.duplicate()
        try:
            return self._beside.once(Worker).queue(name, threaded=True, alone=True)
        except UnavailableError:  # on all ranks
            if thread != "ask":
                self._beside.close()
                raise
            return self._beside.once(Worker).queue(name, alone=True)

    def _meet(self, measures: int, dtype: np.dtype, thread: str) -> None:
        """Make this rank's ends of the messages. Collective."""
        self._messages = self.topology.private()
        self._unit = unit_type()
        self._waits = Waits(self.topology, self._communication)
        self._waits_beside = Waits(self.topology, stopwatch.make("cpu"))  # what computing hides does not count
        shape = measures, dtype, self._unit
        if self.rank in self.servers:
            part = self._slices[self.servers.index(self.rank)]
            if self._shard is None:
                self._shard = Shard(self.replica, self._parameters, self._gradients, part)
            length = part.stop - part.start
            waits = self._waits_beside if thread == "serve" else self._waits
            self._desk = Desk(self._messages, waits, self.workers, measures, length, dtype, self._unit)
        if self.rank in self.workers:
            self._client = Client(self._messages, self._waits, self._waits_beside, self.servers, self._slices, *shape)

    def _apart(self) -> dict[str, str]:
        return dict.fromkeys([*self.replica.updated, LEARNING_RATES], "the servers have them")

    @property
    def _fresh_gradients(self) -> Any:
        return None if self.part is None else self._gradients

    def _meter(self, batches: Batches) -> Any:
        self._tally = Tally(self.replica.metrics)
        return self._tally

    def _spread(self) -> None:
        """Give all ranks the parameters of the servers. Collective."""
        for server, part in zip(self.servers, self._slices, strict=True):
            for piece in pieces(self._parameters[part]):
                request = self._comm.Ibcast(piece, server)
                self._waits.all_of([request], "get all parameters at the end of an epoch")
        self.replica.refresh()

    def _told(self, counts: Counts) -> dict[str, Any]:
        """What the first server has counted in an epoch, as logs. Collective."""
        sizes = np.array([len(counts.behind), counts.dropped, counts.cut_short], np.int64)
        self._hear(sizes)
        behind = np.zeros(sizes[0], np.int64)
        if self.rank == self.servers[0]:
            behind[:] = counts.behind
        self._hear(behind)
        self.cut_short = bool(sizes[2])
        return {"staleness": behind.tolist(), "dropped": int(sizes[1])}

    def _hear(self, numbers: np.ndarray) -> None:
        """Take on those of the first server. Collective."""
        wait_for(self._comm, self._comm.Ibcast(numbers, self.servers[0]), "hear what the first server has counted")

    def _whole(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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

    def _complete(self) -> None:
        state = self._whole(self.replica.state())
        self._on_one(partial(self.replica.load_state, state))

    def _close(self) -> None:
        state = self._whole(self.replica.state())
        for end in (self._desk, self._client):
            if end is not None:
                end.close()
        if self._lane is not None:
            self._lane.close()
            self._beside.close()
        self._let_go(state)
        self._waits.forget()
        self._waits_beside.forget()
        self._unit.Free()
        self.topology.release(self._messages)
        if self._owns_topology:
            self.topology.close()

    def abandon(self) -> None:
        super().abandon()
        for end in (self._desk, self._client):
            if end is not None:
                end.abandon()
        self._let_go(None)

    def _let_go(self, state: dict[str, np.ndarray] | None) -> None:
        """Leave nothing that messages still use in the replica. Local."""
        self.replica.bind(np.zeros_like(self._gradients))
        self.replica.bind_parameters(np.empty_like(self._parameters))
        if state is not None:
            self.replica.load_state(state)
        self._desk = self._client = self._shard = None


@contextmanager
def ended(beside: Future) -> Iterator[None]:
    """A loss that is met inside is raised when the call in the other thread has ended too, which hears of it too."""
    try:
        yield
    except RankLostError:
        with suppress(Exception):
            beside.wait()
        raise


def agree_on_arguments(
    ranks: Topology, replica: Replica, row: str, error: Exception | None, on_failure: str | None
) -> None:
    """Raise on all ranks what is wrong with the arguments of any, before anything is made. Collective.

    row: the call in words, the same on all ranks. error: what is wrong with it here.
    """
    error = trainer.replica_refusal(replica) or error
    if error is None and replica.device != "cpu":
        error = ArgumentError(f"{row} works on the CPU, and this replica is on {replica.device}")
    if error is None and replica.tables:
        what = f"this {type(replica).__name__} has sparse gradients (of its {replica.tables[0].name})"
        error = ArgumentError(f"{what}, which servers have no place for; use MirroredTrainer or CentralStorageTrainer")
    error = error or refusal(on_failure, ranks, replica)
    ranks.agree([zlib.crc32(row.encode())], row, error)
