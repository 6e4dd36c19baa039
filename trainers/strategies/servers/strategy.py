"""The strategies of ParameterServerTrainer: workers push gradients to servers, which update synchronously or as
gradients arrive."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from allreduce import NAMES, notices
from allreduce.topology import Topology
from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, combine, everywhere, together
from trainers.arguments import integer_error, is_integer, name_error
from trainers.data import Batch, BatchSource, row_count
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica
from trainers.strategies.interface import EpochRun, Strategy
from trainers.strategies.rule import WEIGHT, StepOptions, sum_over_ranks
from trainers.strategies.servers.asynchronous import (
    HOW_FAR,
    Asynchronous,
    Dealer,
    EpochLedger,
    StalenessRule,
    StreamParts,
)
from trainers.strategies.servers.mailbox import (
    AGAIN,
    END,
    ENDED,
    GRADIENTS,
    NOTHING,
    PUSH,
    WORK,
    Client,
    Header,
    Message,
)
from trainers.strategies.servers.server import Server
from trainers.strategies.servers.service import ServerStrategy, wait_before_raising
from trainers.strategies.servers.worker import WorkerRanks, divide, uneven_text
from trainers.strategies.step import Step
from trainers.transforms.clip import sum_of_squares

# the values that these arguments of a ParameterServerTrainer may have
CHOICES = {"updates": ("sync", "async"), "stale": ("keep", "drop", "scale"), "learning_rate": ("keep", "divide")}


def server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], ArgumentError | None]:
    """Return (server ranks in ascending order, None), or ((), error) if `servers` is invalid."""
    if is_integer(servers):
        if text := integer_error("servers", servers, 1):
            return (), ArgumentError(text)
        chosen = tuple(range(max(0, ranks - int(servers)), ranks))
        missing = servers > ranks
    else:
        try:
            chosen = tuple(sorted(int(rank) for rank in servers))
        except (TypeError, ValueError):
            return (), ArgumentError(f"servers={servers!r} is neither a number nor ranks; give 1, or (3, 4)")
        if not chosen or len(set(chosen)) < len(chosen):
            return (), ArgumentError(f"servers={servers!r}: give at least one rank, and each of them once")
        missing = not set(chosen) <= set(range(ranks))
    if missing:
        return (), ArgumentError(f"servers={servers!r}, and there are {ranks} ranks, 0 to {ranks - 1}")
    if len(chosen) == ranks:
        return (), ArgumentError(
            f"servers={servers!r} leaves no worker (ranks: {ranks}): start more ranks, or use fewer servers"
        )
    return chosen, None


def worker_error(ranks_per_worker: Any, backend: Any, ranks: int) -> ArgumentError | None:
    """Return the error if these arguments are invalid with `ranks` ranks that compute, or None."""
    if text := integer_error("ranks_per_worker", ranks_per_worker, 1):
        return ArgumentError(text)
    if ranks_per_worker > ranks:
        count = f"{ranks} rank{'s are' if ranks != 1 else ' is'} left for workers"
        return ArgumentError(
            f"ranks_per_worker={ranks_per_worker}, and {count}: start more ranks, or give at most {ranks}"
        )
    if ranks_per_worker == 1 and backend != "auto":
        return ArgumentError(
            f"allreduce={backend!r} has no use with ranks_per_worker=1, where no worker sums gradients; leave it out"
        )
    if backend not in NAMES:
        return ArgumentError(f"allreduce={backend!r} is unknown; use the name of a backend: {', '.join(NAMES)}")
    return None


def options_error(updates: Any, stale: Any, most: Any, warm_up: Any, rate: Any) -> ArgumentError | None:
    """Return the error if these options of a parameter server are invalid, or None."""
    for name, value in (("updates", updates), ("stale", stale), ("learning_rate", rate)):
        if text := name_error(name, value, CHOICES[name]):
            return ArgumentError(text)
    limits = integer_error("max_staleness", most, 0, optional=True) or integer_error("warm_up", warm_up, 0)
    if limits:
        return ArgumentError(limits)
    if stale == "drop" and most is None:
        return ArgumentError('stale="drop" needs max_staleness: gradients of a larger staleness are dropped')
    given = [stale != "keep" and "stale", most is not None and "max_staleness", warm_up and "warm_up",
             rate != "keep" and "learning_rate"]  # fmt: skip
    useless = [name for name in given if name]
    if updates == "sync" and useless:
        return ArgumentError(f'{useless[0]} has no use with updates="sync", where no gradient is stale; leave it out')
    return None


class EpochRows:
    """The rows of one epoch, divided into parts that servers deal to workers. The ranks of a worker divide a part.

    parts: the number of parts of a batch. ahead: whether `prepare` fetches rows in advance. place, ranks: this rank's
        place in its worker, and the number of its ranks.
    """

    def __init__(
        self, batches: BatchSource, epoch: int, parts: int, ahead: bool, place: int = 0, ranks: int = 1
    ) -> None:
        self._batches, self._epoch = batches, epoch
        self._parts, self._ahead = parts, ahead
        self._place, self._ranks = place, ranks
        self._ready: dict[int, Batch | Exception] = {}
        self.ended = False  # the stream has ended on this rank: the part that was taken does not exist

    def prepare(self, number: int) -> None:
        """Fetch the rows of part `number` in advance; an error is raised by `take`."""
        if self._ahead:
            try:
                self._ready[number] = self._share(number)
            except Exception as error:  # any exception of the data set: `take` raises it
                self._ready[number] = error

    def take(self, number: int) -> Batch:
        """Return this rank's rows of part `number` of the epoch, which is a part of batch number // parts. `rows` and
        `share` of the result are those of the part. Raises DataError."""
        found = self._ready.pop(number, None)
        if isinstance(found, Exception):
            raise found
        return self._share(number) if found is None else found

    def _share(self, number: int) -> Batch:
        step, part = divmod(number, self._parts)
        if self._batches.streams:
            batch = self._batches.part_of(step, part)
            self.ended = batch is None
            if batch is None:
                return Batch(np.empty(0), np.empty(0), 0, 0.0)
            return batch._replace(rows=row_count(batch.x), share=1.0)
        own, owns = part * self._ranks + self._place, self._parts * self._ranks
        batch = self._batches.share(self._epoch, step, own, owns)
        places = range(part * self._ranks, (part + 1) * self._ranks)
        rows = sum(self._batches.part_rows(step, place, owns) for place in places)
        return batch._replace(rows=rows, share=batch.own / rows if rows else 0.0)


class Options(NamedTuple):
    """The arguments of a ParameterServerTrainer; see there."""

    servers: Any
    updates: str
    stale: str
    max_staleness: int | None
    warm_up: int
    learning_rate: str
    ranks_per_worker: int = 1
    allreduce: str = "auto"


class ParameterServers(ServerStrategy):
    """Base of the strategies of ParameterServerTrainer: a rank is either a server or a worker."""

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        optional = getattr(replica, "optional", 0)
        super().__init__(replica, name, len(getattr(replica, "metrics", ())) + optional)
        self._used = np.zeros(optional)  # of each parameter: the ranks of this worker that have a gradient for it
        self._options, self.updates = options, options.updates
        self._nodes: list[int] = []  # of each rank, if workers have several ranks

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def _own_argument_error(self, ranks: Topology) -> Exception | None:
        given = self._options
        servers, error = server_ranks(given.servers, ranks.size)
        error = error or options_error(*given[1:6])
        error = error or worker_error(given.ranks_per_worker, given.allreduce, ranks.size - len(servers))
        rates = given.stale == "scale" or given.learning_rate == "divide"
        if error is None and rates and not getattr(self.replica, "learning_rates", True):
            error = ArgumentError(
                f"{type(self.replica).__name__} has no learning rate that can be set, so leave out "
                'stale="scale" and learning_rate="divide"'
            )
        return error

    def renumber(self, previous: tuple[int, ...]) -> None:
        given = self._options.servers
        if isinstance(given, int):  # keep a worker as long as two ranks remain
            servers: Any = min(given, max(1, len(previous) - 1))
        else:  # the remaining servers, or the last rank if none remains
            servers = [rank for rank, old in enumerate(previous) if old in given] or 1
        count = servers if isinstance(servers, int) else len(servers)
        most = max(1, len(previous) - count)
        self._options = self._options._replace(
            servers=servers, ranks_per_worker=min(self._options.ranks_per_worker, most)
        )

    def _assign(self, group: RankGroup) -> None:
        self.servers, _ = server_ranks(self._options.servers, group.size)
        self._learn_nodes(group)
        ranks = [rank for rank in range(group.size) if rank not in self.servers]
        self.workers = divide(ranks, self._nodes, self._options.ranks_per_worker)
        if text := uneven_text(self.workers, self._nodes, self._options.ranks_per_worker):
            notices.once(group.rank, text)

    def _learn_nodes(self, group: RankGroup) -> None:
        """Set `_nodes`. Collective."""
        several = self._options.ranks_per_worker > 1
        node = group.topology.node_index
        self._nodes = all_values(group.comm, node, "learn the nodes of the workers") if several else [0] * group.size

    def _join_worker(self) -> None:
        if self._options.ranks_per_worker == 1:
            return
        group = self.group
        self._learn_nodes(group)
        mine = next((ranks for ranks in self.workers if group.rank in ranks), self.servers)
        number = self.workers.index(mine) if mine in self.workers else len(self.workers)
        sizes = list(Counter(self._nodes[rank] for rank in mine).values()) if group.topology.simulated else None
        part = group.topology.split(number, sizes)
        if number == len(self.workers):
            together(group.comm, part.close)
            return
        self._worker = WorkerRanks(self.clock, part)
        shape = self._options.allreduce, self._gradients.size, self._dtype
        self._gradients, self._parameters = together(group.comm, partial(self._worker.allocate, *shape))

    def _set_part(self) -> None:
        """Set `part` and `parts`: all ranks that compute divide a batch. Local."""
        rank, computing = self.group.rank, self.computing
        self.part = computing.index(rank) if rank in computing else None
        self.parts = len(computing)

    def fit_error(self, options: StepOptions | None, rows: str | None) -> str:
        if rows is not None and self.updates == "async" and self._options.ranks_per_worker > 1:
            return (
                'updates="async" with ranks_per_worker divides each part of a batch among the ranks of a worker, so it '
                'needs all rows: arrays or a data set; with a loader use ranks_per_worker=1, or updates="sync"'
            )
        return ""


class ServerStep(Step):
    """A Step whose gradients go to servers. All ranks sum the metrics and flags before."""

    def _add_up_measured(self) -> None:
        self.clock.start()
        combine(self.comm, self.measured, "a step of fit")
        self.clock.stop()


class SynchronousServers(ParameterServers):
    """A step waits for all workers, and the workers divide the batch. The servers own the parameters."""

    uses_mailbox = False

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        super().__init__(replica, name, options)
        self._summands: list[np.ndarray] = []  # memory for this server's slices of all workers' gradients
        self._applied = False  # whether this rank has taken step `steps` + 1
        self._squares: float | None = None  # of all gradients of this step, added up, if they are clipped
        self._collected: list[np.ndarray] = []  # `_summands` between the exchange and the end of a step, else []

    def make_meter(self, batches: BatchSource) -> Any:
        self._meter = Strategy.make_meter(self, batches)
        return self._meter

    def end_epoch(self) -> dict[str, Any]:
        return {"staleness": [self._meter.taken] * (self._meter.taken > 0), "dropped": 0}

    def _make_endpoints(self) -> None:
        super()._make_endpoints()
        self.core = ServerStep(self, self._gradients, self.measured, ahead=True)
        self.core.owners, self.core.computes = self, self.part is not None

    def _unbind_replica(self, state: dict[str, np.ndarray] | None) -> None:
        super()._unbind_replica(state)
        if self.core is not None:  # None if a rank has failed while the trainer was made
            self.core.drop()
        self.core = None

    # The servers as owners, in the order of a step

    def reduce(self) -> None:
        """Sum the gradients of each worker's ranks, and send them to the servers, each server its slice. Collective."""
        comm, shard, requests = self._messages, self._shard, []
        if self.part is not None:
            self._worker.reduce()
        if self.group.rank in self.leaders:
            for server, part in zip(self.servers, self._slices, strict=True):
                requests += [comm.Isend(piece, server, PUSH) for piece in pieces(self._gradients[part])]
        if shard is not None:
            if len(self._summands) != len(self.workers):
                self._summands = [np.empty_like(shard.gradients) for _ in self.workers]
            for worker, slot in zip(self.leaders, self._summands, strict=True):
                requests += [comm.Irecv(piece, worker, PUSH) for piece in pieces(slot)]
        self._waiter.all_of(requests, f"receive the gradients of step {self.steps + 1}")
        self._collected = self._summands
        # so that no server updates before all servers have the gradients
        if self.recoverable and len(self.servers) > 1:
            self._waiter.all_of([comm.Ibarrier()], "learn that all servers have the gradients of a step")
        if shard is not None:
            shard.add_up(self._summands)

    def squares(self) -> float:
        own = 0.0 if self._shard is None else sum_of_squares(self._shard.trained_gradients)
        self.clock.start()
        self._squares = sum_over_ranks(self._messages, own)
        self.clock.stop()
        return self._squares

    def update(self, squares: float | None) -> None:
        if self._shard is not None:
            self._shard.clip_and_update(squares)
            self._applied = True
        elif squares is not None:  # a checkpoint has the norms that rank 0 knows
            self.rule.norms.set(squares**0.5)

    def share(self) -> None:
        self._broadcast_parameters()
        self._applied = True  # a worker knows only now that the servers have updated

    def count_step(self) -> None:
        super().count_step()
        self._applied, self._collected, self._squares = False, [], None

    def _agree_on_progress(self) -> None:
        """Bring all servers to the newest step. Collective. Servers wait for each other before they update
        (`reduce`), so if one has updated, all have the gradients of that step."""
        taken = self.steps + self._applied
        positions = all_values(self.group.comm, [taken, self._squares], HOW_FAR)
        newest = max(steps for steps, _ in positions)
        if taken < newest and self._collected and self._shard is not None:
            self._shard.add_up(self._collected)
            self.update(next(squares for steps, squares in positions if steps == newest))
        self.steps, self._applied, self._collected, self._squares = newest, False, [], None


class AsynchronousServers(ParameterServers):
    """A server applies each gradient as it arrives; parts of batches are dealt to the workers that are free."""

    synchronous = False
    thread = "ask"

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        super().__init__(replica, name, options)
        self._ledger = EpochLedger()

    def make_meter(self, batches: BatchSource) -> Any:
        self._ledger = EpochLedger()
        return super().make_meter(batches)

    def _assign(self, group: RankGroup) -> None:
        super()._assign(group)
        self._first_workers = len(self.workers)
        self._own_numbers = list(range(self._first_workers))  # of the workers that remain, before any failed

    def _set_part(self) -> None:
        rank = self.group.rank
        self.part = next((number for number, ranks in enumerate(self.workers) if rank in ranks), None)
        self.parts = self._first_workers  # also after failures: the remaining workers compute all parts of a batch

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        given = self._options
        rate = 1 / len(self.workers) if given.learning_rate == "divide" else 1.0
        self._rule = StalenessRule(given.stale, given.max_staleness, rate)
        self._own_number = self.part  # before any worker failed

    def _agree_on_progress(self) -> None:
        self._ledger.agree(self.group.comm, self._shard is not None)
        numbers = all_values(self.group.comm, self._own_number, HOW_FAR)
        self._own_numbers = [numbers[ranks[0]] for ranks in self.workers]

    def run_epoch(self, run: EpochRun, number: int) -> None:
        streams = run.batches.streams
        if streams and self._ledger.epoch != number:
            run.begin_stream(number, 0)
        self._ledger.begin(number, 0 if streams or self._shard is None else run.batches.steps * self.parts)
        try:
            if self._mailbox is None:
                self._work(run, number)
            else:
                self._serve(run, number)
        except Exception as error:
            if everywhere(error, self.group.comm):
                self._broadcast_parameters()
            raise
        self._broadcast_parameters()
        if streams:
            self._learn_sizes(run, number, self._ledger.cut_short)

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return self._logs_of(self._ledger.staleness, self._ledger.dropped, self._ledger.cut_short)

    def _serve(self, run: EpochRun, number: int) -> None:
        assert self._mailbox is not None
        assert self._shard is not None
        everyone, dealer = range(len(self.workers)), None
        if self.group.rank == self.servers[0]:
            dealer = self._dealer(run.batches, number, everyone)

        def halts() -> bool:
            run.idle()
            return self._halt(run) != 0

        more = 4 * self.parts * len(everyone) if run.batches.streams else 0  # a worker has at most two parts
        apply = partial(self._apply, run)
        policy = Asynchronous(self._shard, self._rule, dealer, apply, halts, self._ledger, more)
        Server(self._mailbox, self._shard).serve(policy, everyone)
        self._ledger.cut_short = dealer is not None and dealer.cut_short

    def _dealer(self, batches: BatchSource, number: int, everyone: range) -> Dealer:
        """Return the dealer of epoch `number`. In the warm-up one worker computes at a time: the first worker alone, or
        all in turn, because each worker reads a stream of its own."""
        warms_up, bound = number < self._options.warm_up, self._rule.bound
        if batches.streams:
            parts = StreamParts(self._own_numbers, self.parts, batches.divided, self._ledger.dealt)
            return Dealer(parts, everyone, 0 if warms_up else bound)
        left = np.flatnonzero(~self._ledger.dealt).tolist()
        return Dealer(left, everyone[:1] if warms_up else everyone, bound)

    def _apply(self, run: EpochRun, message: Message, factor: float) -> None:
        """Update this server's slice by the gradients in `message`, and call the callbacks. `run` keeps errors."""
        shard, step = self._shard, message.header.step // self.parts
        assert shard is not None

        def update() -> None:
            run.begin_batch(step)
            self.replica.still = message.measures[len(self.replica.metrics) :] == 0
            with self.clock.span("update"):
                shard.apply(message.body, factor)
            metrics = len(self.replica.metrics)
            self.measured[:metrics] = message.measures[:metrics]
            run.end_batch(step)

        run.keep_error(update)

    def _work(self, run: EpochRun, number: int) -> None:
        """Run an epoch on a rank of a worker: its leader gets parts from the servers and pushes their gradients, and
        all ranks compute them."""
        client, queue, worker = self._client, self._queue, self._worker
        assert queue is not None
        rows = EpochRows(run.batches, number, self.parts, run.batches.ahead > 0, worker.place, worker.size)
        worker.halts = False  # of the last epoch
        if client is not None:
            client.begin()

        def fetch() -> None:
            if client is not None:
                client.fetch(self._halt(run) or int(worker.halts))
            worker.announce(*((0, 0) if client is None else client.replies[0].header[:2]))
            if worker.dealt.kind == WORK:
                rows.prepare(worker.dealt.part)

        run.idle()
        fetch()
        while worker.meet(self._halt(run) != 0).kind != END:
            run.idle()
            if worker.dealt.kind == AGAIN:
                fetch()
                continue
            part = worker.dealt.part
            versions = [] if client is None else client.copy_parameters(self._parameters)
            worker.share_parameters()
            self.replica.refresh()
            coming = queue.submit(fetch)
            with wait_before_raising(coming):
                computed = self._compute_together(run, rows, part)
                if client is not None:
                    self._push(client, run, GRADIENTS if computed else ENDED if rows.ended else NOTHING, part, versions)
                if computed:
                    run.keep_error(partial(run.end_batch, part // self.parts))
            self.clock.start()
            coming.wait()
            self.clock.stop()
        if client is not None:
            client.bye()

    def _push(self, client: Client, run: EpochRun, kind: int, part: int, versions: Sequence[int]) -> None:
        """Push the gradients of a part, or a push without gradients. kind: of the push. versions: of each server's
        parameters."""
        halt = self._halt(run) or int(self._worker.halts)
        headers = [Header(kind, part, version, halt) for version in versions]
        gradients = self._gradients if kind == GRADIENTS else None
        client.push(headers, gradients, [*self.measured[: len(self.replica.metrics)], *self._used])

    def _compute_together(self, run: EpochRun, rows: EpochRows, number: int) -> bool:
        """Compute the gradients and metrics of part `number` on the ranks of this worker, and sum them. Returns False
        if there are none: no rows, an error, or discarded gradients. `run` keeps errors. Collective over the worker."""
        metrics, measured = len(self.replica.metrics), self.measured
        self.rule.take_none()
        count = run.keep_error(partial(self._compute_part, run, rows, number))
        sums = np.array([*measured[:metrics], self.rule.weight, *~self.rule.unused], np.float64)
        if not self._worker.settle(bool(count), self._halt(run) != 0, sums):
            if count:
                self.replica.undo()  # another rank has no gradients of this part
            return False
        measured[:metrics], measured[metrics + WEIGHT], self._used = sums[:metrics], sums[metrics], sums[metrics + 1 :]
        self._worker.reduce()
        trained = [self._gradients[: self.replica.parameter_count]] if self._worker.leads else []
        self.rule.weigh(measured, trained)
        if self._worker.leads:
            self.rule.clip(trained)
        own = count if self._worker.leads else 0  # the rows of the part are counted once
        run.keep_error(lambda: self._tally.add(measured[:metrics], own, number // self.parts))
        return run.error is None

    def _compute_part(self, run: EpochRun, rows: EpochRows, number: int) -> int:
        """Compute this rank's gradients and metrics of part `number`, weighted by its share of the part's rows. Returns
        the rows of the part; 0 if there are none or the gradients are discarded. May raise any exception."""
        step = number // self.parts
        with self.clock.span("data"):
            batch = rows.take(number)
        if not batch.rows:
            return 0
        run.begin_batch(step)
        measured = self.measured[: len(self.replica.metrics)]
        with self.clock.span("compute"):
            measured[:] = self.rule.gradients(run.check_batch(batch), batch.share, self._gradients)
        if run.discard_if_unusable(self._gradients, self.replica):
            return 0
        measured *= batch.share
        return batch.rows
