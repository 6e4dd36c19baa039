"""The strategies of ParameterServerTrainer: workers push gradients to servers, which update synchronously or as
gradients arrive."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.chunked import pieces
from allreduce.transport.control import all_values, combine, everywhere
from trainers.data import Batch, BatchSource
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica, gradients_of
from trainers.strategies.interface import EpochRun, Strategy
from trainers.strategies.servers.epoch import HOW_FAR, Dealer, EpochLedger, EpochServer, StalenessRule
from trainers.strategies.servers.mailbox import GRADIENTS, NOTHING, PUSH, WORK, Header, Message
from trainers.strategies.servers.service import ServerStrategy, wait_before_raising

# the values that these arguments of a ParameterServerTrainer may have
CHOICES = {"updates": ("sync", "async"), "stale": ("keep", "drop", "scale"), "learning_rate": ("keep", "divide")}


def server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], ArgumentError | None]:
    """Return (server ranks in ascending order, None), or ((), error) if `servers` is invalid."""
    if isinstance(servers, int | np.integer) and not isinstance(servers, bool):
        if servers < 1:
            return (), ArgumentError(f"servers must be an integer >= 1, got {servers!r}")
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


def options_error(updates: Any, stale: Any, most: Any, warm_up: Any, rate: Any) -> ArgumentError | None:
    """Return the error if these options of a parameter server are invalid, or None."""
    for name, value in (("updates", updates), ("stale", stale), ("learning_rate", rate)):
        if value not in CHOICES[name]:
            return ArgumentError(f"{name}={value!r} is unknown; use one of {', '.join(CHOICES[name])}")
    for name, value in (("max_staleness", 0 if most is None else most), ("warm_up", warm_up)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            return ArgumentError(f"{name} must be an integer >= 0, got {value!r}")
    if stale == "drop" and most is None:
        return ArgumentError('stale="drop" needs max_staleness: gradients of a larger staleness are dropped')
    given = [stale != "keep" and "stale", most is not None and "max_staleness", warm_up and "warm_up",
             rate != "keep" and "learning_rate"]  # fmt: skip
    useless = [name for name in given if name]
    if updates == "sync" and useless:
        return ArgumentError(f'{useless[0]} has no use with updates="sync", where no gradient is stale; leave it out')
    return None


class EpochRows:
    """The rows of one epoch, divided into parts that servers deal to workers.

    parts: the number of parts of a batch. ahead: whether `prepare` fetches rows in advance.
    """

    def __init__(self, batches: BatchSource, epoch: int, parts: int, ahead: bool) -> None:
        self._batches, self._epoch = batches, epoch
        self._parts, self._ahead = parts, ahead
        self._ready: dict[int, Batch | Exception] = {}

    def prepare(self, number: int) -> None:
        """Fetch the rows of part `number` in advance; an error is raised by `take`."""
        if self._ahead:
            try:
                self._ready[number] = self._share(number)
            except Exception as error:  # any exception of the data set: `take` raises it
                self._ready[number] = error

    def take(self, number: int) -> Batch:
        """Return the rows of part `number` of the epoch, a part of batch number // parts. Raises DataError."""
        found = self._ready.pop(number, None)
        if isinstance(found, Exception):
            raise found
        return self._share(number) if found is None else found

    def _share(self, number: int) -> Batch:
        return self._batches.share(self._epoch, *divmod(number, self._parts))


class Options(NamedTuple):
    """The arguments of a ParameterServerTrainer; see there."""

    servers: Any
    updates: str
    stale: str
    max_staleness: int | None
    warm_up: int
    learning_rate: str
    fetch_ahead: bool


class ParameterServers(ServerStrategy):
    """Base of the strategies of ParameterServerTrainer: a rank is either a server or a worker."""

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        super().__init__(replica, name, len(getattr(replica, "metrics", ())))
        self._options, self.updates = options, options.updates
        self._ledger = EpochLedger()

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def _own_argument_error(self, ranks: Topology) -> Exception | None:
        given = self._options
        _, error = server_ranks(given.servers, ranks.size)
        error = error or options_error(*given[1:6])
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
        self._options = self._options._replace(servers=servers)

    def _assign(self, ranks: int) -> None:
        self.servers, _ = server_ranks(self._options.servers, ranks)
        self.workers = tuple(rank for rank in range(ranks) if rank not in self.servers)

    def _set_part(self) -> None:
        rank = self.group.rank
        self.part = self.workers.index(rank) if rank in self.workers else None
        self.parts = len(self.workers)

    def loader_error(self, divided: bool) -> str:
        if self.updates == "async":
            return (
                'servers with updates="async" deal the rows to workers as they become free, so they need all rows: '
                'arrays or a data set; use updates="sync" with a loader'
            )
        return ""

    def begin_fit(self) -> None:
        self._ledger = EpochLedger()

    def _begin_epoch(self, number: int, parts: int) -> None:
        """Begin epoch `number` of `parts` parts, or continue it after a failure. Local."""
        self._ledger.begin(number, 0 if self._shard is None else parts)

    def end_epoch(self) -> dict[str, Any]:
        return self._logs_of(self._ledger.counts())


class SynchronousServers(ParameterServers):
    """A step waits for all workers, and the workers divide the batch."""

    uses_mailbox = False

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        super().__init__(replica, name, options)
        self._first = 0  # the steps before this epoch
        self._summands: list[np.ndarray] = []  # memory for this server's slices of all workers' gradients
        self._applied = False  # whether this rank has taken step `steps` + 1
        self._collected: list[np.ndarray] = []  # `_summands` between the exchange and the end of a step, else []

    def make_meter(self, batches: BatchSource) -> Any:
        return Strategy.make_meter(self, batches)

    def run_epoch(self, run: EpochRun, number: int) -> None:
        self._begin_epoch(number, 0 if run.batches.streams else run.batches.steps)
        self._first = self.steps - run.first_step
        run.run_steps(number)

    def compute(self, batch: Batch | None) -> None:
        measured = self.measured[: len(self.replica.metrics)]
        measured[:] = 0
        if batch is None:
            self._gradients[:] = 0  # else a callback would see the gradients of an earlier step
        elif self.part is not None:
            measured[:] = gradients_of(self.replica, batch.data, batch.share)
            measured *= batch.share

    def step(self, flags: tuple[float, ...]) -> Any:
        measured = self.measured
        measured[len(self.replica.metrics) :] = flags
        self.clock.start()
        combine(self.group.comm, measured, "a step of fit")
        self.clock.stop()
        if measured[-1]:  # a rank has failed
            return measured
        self._collect()
        if self._shard is not None:
            self._update_collected()
        self._broadcast_parameters()
        self._applied = True
        return measured

    def _collect(self) -> None:
        """Send every worker's gradients to the servers, each server its slice. Collective."""
        comm, shard, requests = self._messages, self._shard, []
        if self.part is not None:
            for server, part in zip(self.servers, self._slices, strict=True):
                requests += [comm.Isend(piece, server, PUSH) for piece in pieces(self._gradients[part])]
        if shard is not None:
            if len(self._summands) != len(self.workers):
                self._summands = [np.empty_like(shard.gradients) for _ in self.workers]
            for worker, slot in zip(self.workers, self._summands, strict=True):
                requests += [comm.Irecv(piece, worker, PUSH) for piece in pieces(slot)]
        self._waiter.all_of(requests, f"receive the gradients of step {self.steps + 1}")
        self._collected = self._summands
        # so that no server updates before all servers have the gradients
        if self.recoverable and len(self.servers) > 1:
            self._waiter.all_of([comm.Ibarrier()], "learn that all servers have the gradients of a step")

    def count_step(self) -> None:
        super().count_step()
        self._applied, self._collected = False, []

    def _update_collected(self) -> None:
        assert self._shard is not None
        self._shard.add_up(self._collected)
        with self.span("update"):
            self._shard.update()
        self._ledger.note(self.steps - self._first, 0)
        self._applied = True

    def _agree_on_progress(self) -> None:
        """Bring all servers to the newest step. Collective. Servers wait for each other before they update
        (`_collect`), so if one has updated, all have the gradients of that step."""
        taken = self.steps + self._applied
        newest = max(all_values(self.group.comm, taken, HOW_FAR))
        if taken < newest and self._collected:
            self._update_collected()
        self.steps, self._applied, self._collected = newest, False, []


class AsynchronousServers(ParameterServers):
    """A server applies each gradient as it arrives; parts of batches are dealt to the workers that are free."""

    synchronous = False
    thread = "ask"

    def _set_part(self) -> None:
        super()._set_part()
        self.parts = self._first_workers  # also after failures: the remaining workers compute all parts of a batch

    def connect(self, group: RankGroup) -> None:
        servers, _ = server_ranks(self._options.servers, group.size)
        self._first_workers = group.size - len(servers)
        super().connect(group)
        given = self._options
        rate = 1 / len(self.workers) if given.learning_rate == "divide" else 1.0
        self._rule = StalenessRule(given.stale, given.max_staleness, rate)

    def _agree_on_progress(self) -> None:
        self._ledger.agree(self.group.comm, self._shard is not None)

    def run_epoch(self, run: EpochRun, number: int) -> None:
        self._begin_epoch(number, run.batches.steps * self.parts)
        self._run_and_broadcast(partial(self._work if self._mailbox is None else self._serve, run, number))

    def _run_and_broadcast(self, epoch: Callable[[], None]) -> None:
        """Run `epoch()`, then broadcast the servers' parameters to all ranks. Collective."""
        try:
            epoch()
        except Exception as error:
            if everywhere(error, self.group.comm):  # all ranks have this error
                self._broadcast_parameters()
            raise
        self._broadcast_parameters()

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return super().end_epoch()

    def _serve(self, run: EpochRun, number: int) -> None:
        assert self._mailbox is not None
        assert self._shard is not None
        dealer = None
        everyone = range(len(self.workers))
        if self.group.rank == self.servers[0]:
            active = everyone[:1] if number < self._options.warm_up else everyone
            left = np.flatnonzero(~self._ledger.dealt).tolist()
            dealer = Dealer(left, active, self._rule.bound, self._options.fetch_ahead)
        apply, halts = partial(self._apply, run), partial(self._halts, run)
        EpochServer(self._mailbox, self._shard, self._rule, dealer, apply, halts, self._ledger).serve(everyone)

    def _apply(self, run: EpochRun, message: Message, factor: float) -> None:
        """Update this server's slice by the gradients in `message`, and call the callbacks. `run` keeps errors."""
        shard, step = self._shard, message.header.step // self.parts
        assert shard is not None

        def update() -> None:
            run.begin_batch(step)
            with self.span("update"):
                shard.apply(message.body, factor)
            self.measured[: len(self.replica.metrics)] = message.measures
            run.end_batch(step)

        run.keep_error(update)

    def _halts(self, run: EpochRun) -> bool:
        """Whether this rank wants the epoch to end."""
        return run.error is not None or self.stop_training

    def _work(self, run: EpochRun, number: int) -> None:
        client, queue = self._client, self._queue
        assert client is not None
        assert queue is not None
        rows = EpochRows(run.batches, number, self.parts, run.batches.ahead > 0)
        client.begin()

        def fetch() -> None:
            client.fetch(self._halts(run))
            if (coming := client.replies[0].header).kind == WORK:
                rows.prepare(coming.step)

        fetch()
        while (header := client.replies[0].header).kind == WORK:
            versions = client.copy_parameters(self._parameters)
            self.replica.refresh()
            coming = queue.submit(fetch)
            with wait_before_raising(coming):
                computed = run.keep_error(partial(self._compute_part, run, rows, header.step))
                kind, gradients = (GRADIENTS, self._gradients) if computed else (NOTHING, None)
                halts = self._halts(run)
                headers = [Header(kind, header.step, version, halts) for version in versions]
                client.push(headers, gradients, self.measured[: len(self.replica.metrics)])
                if computed:
                    run.keep_error(partial(run.end_batch, header.step // self.parts))
            self.clock.start()
            coming.wait()
            self.clock.stop()
        client.bye()

    def _compute_part(self, run: EpochRun, rows: EpochRows, number: int) -> bool:
        """Compute the gradients and metrics of part `number`. Returns False if it has no rows or its gradients are
        discarded. May raise any exception."""
        step = number // self.parts
        with self.span("data"):
            batch = rows.take(number)
        if not batch.own:
            return False
        run.begin_batch(step)
        measured = self.measured[: len(self.replica.metrics)]
        with self.span("compute"):
            measured[:] = gradients_of(self.replica, run.check_batch(batch).data, 1.0)
        if run.discard_if_unusable(self._gradients, self.replica):
            return False
        self._tally.add(measured, batch.own, step)
        return True
