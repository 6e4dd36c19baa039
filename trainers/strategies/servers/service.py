"""Base of the strategies with servers: the roles of the ranks, the flat buffers, and the collection of the state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes
from allreduce.arrays.chunks import chunk
from allreduce.call.queue import Future, Queue, Worker
from allreduce.errors import RankLostError, UnavailableError
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.transport.chunked import pieces
from allreduce.transport.control import combine, on_all_ranks, root_value, together
from trainers import stopwatch
from trainers.backends import bind_own
from trainers.checks import LEARNING_RATES
from trainers.data import BatchSource
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica, Slices, attach, changing_entries, check_divisible, sliced_entries, snapshot_of
from trainers.state.adopt import Piece, complete, gathered, mirror
from trainers.state.owners import Owners
from trainers.strategies import alike
from trainers.strategies.interface import EpochRun, Strategy, replica_error
from trainers.strategies.rule import FLAGS
from trainers.strategies.servers.mailbox import FAILED, PARAMETERS, STOP, Client, Mailbox, Waiter
from trainers.strategies.servers.server import Shard
from trainers.strategies.servers.worker import WorkerRanks, Workers
from trainers.watching.meter import Tally

SIZES, HOW_FAR = "learn the rows of the batches of an epoch", "learn the positions of the servers"


class ServerStrategy(Strategy, Owners):
    """Base of the strategies in which servers hold slices of the flat parameters, and workers compute gradients.

    servers: the ranks that hold the parameters, in the order of their slices. workers: the ranks of each worker. Its
        first rank, the leader, speaks with the servers.
    extra: the numbers (float64) in each message besides the metrics and one for each of Replica.optional.
    thread: the task of the second thread while this rank computes: "ask": requests the next part and its parameters
        (without MPI threads this is done after the computation); "serve": runs the server (needs MPI threads), and a
        rank requests its next part when it has pushed its gradients.
    """

    synchronous = False
    mirrors = "epoch"
    kind = "servers"
    extra = 0
    thread: str
    # None where this rank has none
    _mailbox: Mailbox = None  # type: ignore[assignment]  # of a server
    _client: Client = None  # type: ignore[assignment]  # of the leader of a worker
    _shard: Shard = None  # type: ignore[assignment]  # of a server
    _queue: Queue = None  # type: ignore[assignment]  # of the second thread

    def __init__(self, replica: Replica, name: str) -> None:
        super().__init__(replica, name)
        self.servers: tuple[int, ...] = ()
        self.workers: Workers = ()
        self._worker = WorkerRanks(stopwatch.make("cpu"))  # of this rank
        self._connected = False  # whether `_mailbox` and `_client` were created
        self._parameters = self._gradients = np.empty(0)
        self._bound: np.ndarray | None = None  # the buffer of gradients to which the replica is bound

    # Construction

    def argument_error(self, ranks: Topology) -> Exception | None:
        if error := replica_error(self.replica, self):
            return error
        if self.replica.device != "cpu":
            return ArgumentError(f"{self.describe()} works on the CPU, and this replica is on {self.replica.device}")
        return None

    def _assign(self, group: RankGroup) -> None:
        """Set `servers` and `workers`. Local."""
        raise NotImplementedError

    def _join_worker(self) -> None:
        """Create `_worker`, and put the flat buffers of a worker of several ranks into its memory. Collective."""

    def _set_part(self) -> None:
        """Set `part` and `parts`. Local."""
        raise NotImplementedError

    def _agree_on_progress(self) -> None:
        """After a failure, bring all ranks to the servers' position in the epoch. Collective."""
        raise NotImplementedError

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        replica, self._connected = self.replica, False
        if replica.allocates:
            malloc.keep_freed_memory()
        self._assign(group)
        self._measures = len(replica.metrics) + replica.optional + self.extra
        self.measured = np.zeros(len(replica.metrics) + len(FLAGS))
        length = replica.gradient_length
        self._dtype = dtypes.parse(replica.gradient_dtype)
        self._gradients, self._parameters = (np.zeros(length, self._dtype) for _ in range(2))
        self._slices = [chunk(length, len(self.servers), number) for number in range(len(self.servers))]
        self._shard = None  # type: ignore[assignment]
        mirror(self, whole=False)
        self._join_worker()
        together(group.comm, self._bind)
        self._make_endpoints()

    def _bind(self) -> None:
        """Bind the replica to the flat buffers, unless it is bound to them already. Local."""
        if self._bound is self._gradients:
            return
        try:
            check_divisible(self.replica, whole=False)
        except ArgumentError as error:
            raise ArgumentError(
                f'{self.name} updates slices of the parameters, as MirroredTrainer does with update="sharded", and '
                f"this model or its optimizer can't: {error}"
            ) from error
        attach(self.replica, self._parameters, self._gradients)
        self._bound = self._gradients

    def _make_endpoints(self) -> None:
        """Create this rank's queue, mailbox and client. Collective."""
        topology, rank = self.group.topology, self.group.rank
        self._queue = self._make_queue()
        self._set_part()
        self._messages: MPI.Intracomm = topology.private()
        self._waiter = Waiter(topology, self.clock)
        # waits that overlap with computation do not count as communication
        self._overlapped_waiter = Waiter(topology, stopwatch.make("cpu"))
        if rank in self.servers:
            part = self._slices[self.servers.index(rank)]
            if self._shard is None:
                self._shard = Shard(self.replica, self.rule, self._parameters, self._gradients, part)
            length = part.stop - part.start
            waiter = self._overlapped_waiter if self.thread == "serve" else self._waiter
            self._mailbox = Mailbox(self._messages, waiter, self.leaders, self._measures, length, self._dtype)
        if rank in self.leaders:
            ahead = self._overlapped_waiter if self.thread == "ask" else self._waiter
            ends = self._messages, self._waiter, ahead
            self._client = Client(*ends, self.servers, self._slices, self._measures, self._dtype)
        self._connected = True

    def _make_queue(self) -> Queue:
        """Create the queue of the second thread, of a worker of its own: its calls wait for calls of another kind on
        other ranks, so no other queue may wait for them. Collective."""
        name, worker = f"parameters of {self.name}", Worker(self.group.topology)
        try:
            return worker.queue(name, threaded=True, alone=True)
        except UnavailableError:  # on all ranks
            if self.thread != "ask":
                worker.free(self.group.topology)
                raise
            return worker.queue(name, alone=True)

    def close(self) -> None:
        if not self._connected:
            self._worker.close()
            return
        state = self.gather_state(self.replica.state())
        for end in (self._mailbox, self._client):
            if end is not None:
                end.close()
        if self._queue is not None:
            self._queue.close()
            self._queue.worker.free(self.group.topology)
        self._unbind_replica(state)
        self._worker.close()
        self._waiter.forget()
        self._overlapped_waiter.forget()
        self.group.topology.release(self._messages)

    def abandon(self) -> None:
        self._abandon_ends()
        if self._gradients.size:
            self._unbind_replica(None)

    def _abandon_ends(self) -> None:
        """Drop everything that leads to other ranks. Local."""
        for end in (self._mailbox, self._client, self._queue and self._queue.worker, self._worker):
            if end is not None:
                end.abandon()

    def _unbind_replica(self, state: dict[str, np.ndarray] | None) -> None:
        """Bind the replica to new memory: messages may still use the old. Then load `state`, if given. Local."""
        bind_own(self.replica)
        if state is not None:
            self.replica.load_state(state)
        self._mailbox = self._client = self._shard = None  # type: ignore[assignment]
        self._gradients = self._parameters = np.empty(0)
        self._bound = None

    # Recovery after failures

    def rescue(self) -> None:
        self._abandon_ends()
        self._mailbox = self._client = self._queue = None  # type: ignore[assignment]
        self._worker = WorkerRanks(self.clock)

    def follow(self, previous: tuple[int, ...]) -> None:
        now = {old: rank for rank, old in enumerate(previous)}
        self.servers = tuple(now[rank] for rank in self.servers if rank in now)
        left = (tuple(now[rank] for rank in ranks if rank in now) for ranks in self.workers)
        self.workers = tuple(ranks for ranks in left if ranks)  # a worker keeps its remaining ranks

    def rebuild(self, go_back: Callable[[], bool]) -> bool:
        """Load the servers' parameters on all ranks. Raises RankLostError on all ranks if a server, or every worker,
        has failed. Collective."""
        lost = "" if self.workers else "all workers have failed, and servers do not compute"
        if len(self.servers) < len(self._slices):
            lost = "a server has failed, and its slice of the parameters and of the optimizer's state is lost"
        if lost:
            text = f"{lost}; resume from the last checkpoint (resume=True, --resume)"
            raise on_all_ranks(RankLostError(text), self.group.comm)
        self._join_worker()
        together(self.group.comm, self._bind)
        self._make_endpoints()
        self._agree_on_progress()
        self.share_parameters()
        return True

    # Steps and epochs

    @property
    def leaders(self) -> tuple[int, ...]:
        """The ranks that speak with the servers, one of each worker."""
        return tuple(ranks[0] for ranks in self.workers)

    @property
    def computing(self) -> tuple[int, ...]:
        """The ranks that compute, worker by worker."""
        return tuple(rank for ranks in self.workers for rank in ranks)

    def _halt(self, run: EpochRun) -> int:
        """Whether, and why, this rank asks to end the epoch: 0, STOP or FAILED; see Header."""
        return FAILED if run.error is not None else STOP if self.stop_training else 0

    def make_meter(self, batches: BatchSource) -> Any:
        self._tally = Tally(self.replica.metrics)
        return self._tally

    def _collect_tally(self) -> None:
        """Sum the metrics of an epoch over the ranks. Raises DivergedError on all ranks if they or a server's
        parameters are not finite. Collective."""
        self._tally.collect(self.group.comm, self._shard is None or self._shard.is_finite())

    @property
    def owners(self) -> Owners:
        return self

    @property
    def own_part(self) -> Slices | None:  # type: ignore[override]
        return slice(0, 0) if self._shard is None else self._shard.part

    def _learn_sizes(self, run: EpochRun, number: int, cut: bool, sizes: Sequence[int] | None = None) -> None:
        """Tell all ranks the rows of the batches of epoch `number` of a stream. Raises DataError on all ranks if whole
        batches differ, or a rank can't read the rest of them. Collective.

        cut: whether the epoch was ended before its last batch. sizes: the rows of each batch, the same on all ranks;
            None if each rank knows its own.
        """
        batches, comm = run.batches, self.group.comm
        own = [rows for rows, _ in batches.seen.values() if rows]
        ends = [len(own if sizes is None else sizes), cut or run.error is not None]
        length, cut = combine(comm, np.array(ends, np.int64), SIZES, MPI.MAX).tolist()
        if not batches.divided and not cut:
            together(comm, partial(batches.peek, length))  # reads the rest of the epoch, so that `seen` has it
        own = [rows for rows, _ in batches.seen.values() if rows][: length + 1]
        rows = np.zeros(length + 1, np.int64)
        rows[: len(own)] = own
        most = combine(comm, rows.copy(), SIZES, MPI.SUM if batches.divided else MPI.MAX)
        if not batches.divided and (wrong := alike.error(batches, number, comm)):
            raise wrong
        for step, total in enumerate(most[:length].tolist() if sizes is None else sizes):
            batches.learn(step, total)

    def share_parameters(self) -> None:
        """Give all ranks the servers' parameters: servers send them to the workers' leaders, and these to the other
        ranks of their workers. Collective."""
        rank, comm, speakers = self.group.rank, self._messages, {*self.servers, *self.leaders}
        requests: list[MPI.Request] = []
        for server, part in zip(self.servers, self._slices, strict=True):
            others = speakers - {server}
            for piece in pieces(self._parameters[part]):
                if rank == server:
                    requests += [comm.Isend(piece, other, PARAMETERS) for other in others]
                elif rank in others:
                    requests.append(comm.Irecv(piece, server, PARAMETERS))
        self._waiter.all_of(requests, "receive the parameters of the servers")
        self._worker.share_parameters()
        self.replica.refresh()

    def _logs_of(self, staleness: Sequence[int], dropped: int, cut_short: bool) -> dict[str, Any]:
        """Return the first server's counts of an epoch as logs, on all ranks; sets `cut_short`. Collective."""
        counts = [list(staleness), dropped, cut_short]
        what = "receive the counts of the first server"
        staleness, dropped, self.cut_short = root_value(self.group.comm, counts, what, self.servers[0])
        return {"staleness": staleness, "dropped": dropped}

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        complete(self)
        return together(self.group.comm, lambda: snapshot_of(self.replica, memory) if wanted else {})

    def not_replicated(self) -> dict[str, str]:
        return dict.fromkeys(
            [*changing_entries(self.replica), LEARNING_RATES], "only the servers have the current values"
        )

    def gather_state(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `state` with the servers' values of updated entries; the first server's if not sliced. Collective."""
        own = []
        if self._shard is not None:
            part = self._shard.part
            sliced = {name: np.asarray(state[name])[part] for name in ("parameters", *sliced_entries(self.replica))}
            others = set(changing_entries(self.replica)) - sliced.keys() if self.group.rank == self.servers[0] else ()
            own = [Piece(0, 0, part.start, part.stop, sliced, {name: state[name] for name in sorted(others)})]
        # the group's communicator may be freed by now
        return {**state, **gathered(self._messages, own, self._parameters.size)}


@contextmanager
def wait_before_raising(other: Future) -> Iterator[None]:
    """Context manager: if the block raises RankLostError, wait for the other thread's call `other` to end, then raise
    it."""
    try:
        yield
    except RankLostError:
        with suppress(Exception):
            other.wait()
        raise
