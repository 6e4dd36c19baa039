"""The strategy of ParameterServerTrainer(updates="async"): workers push gradients to servers, which update as gradients
arrive."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.topology import Topology
from allreduce.transport.control import all_values, everywhere, together
from trainers.data import Batch, BatchSource
from trainers.group import RankGroup
from trainers.replica import Replica, undo_batch
from trainers.strategies.interface import EpochRun
from trainers.strategies.rule import WEIGHT
from trainers.strategies.servers.asynchronous import (
    HOW_FAR,
    Asynchronous,
    Dealer,
    EpochLedger,
    Parts,
    StalenessRule,
)
from trainers.strategies.servers.mailbox import (
    AGAIN,
    END,
    ENDED,
    GRADIENTS,
    NOTHING,
    WORK,
    Client,
    Header,
    Message,
)
from trainers.strategies.servers.options import Options
from trainers.strategies.servers.server import Server
from trainers.strategies.servers.service import ServerStrategy, wait_before_raising
from trainers.strategies.servers.worker import WorkerRanks, divide, uneven_text


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
        own, owns = part * self._ranks + self._place, self._parts * self._ranks
        batch = self._batches.share(self._epoch, step, own, owns)
        if self._batches.streams:
            self.ended = self._batches.seen[step][0] == 0
            return batch._replace(rows=batch.own, share=1.0)
        places = range(part * self._ranks, (part + 1) * self._ranks)
        rows = sum(self._batches.part_rows(step, place, owns) for place in places)
        return batch._replace(rows=rows, share=batch.own / rows if rows else 0.0)


class AsynchronousServers(ServerStrategy):
    """A server applies each gradient as it arrives; parts of batches are dealt to the workers that are free."""

    thread = "ask"

    def __init__(self, replica: Replica, name: str, options: Options) -> None:
        optional = getattr(replica, "optional", 0)
        super().__init__(replica, name, len(getattr(replica, "metrics", ())) + optional)
        self._used = np.zeros(optional)  # of each parameter: the ranks of this worker that have a gradient for it
        self._options = options
        self._nodes: list[int] = []  # of each rank, if workers have several ranks
        self._ledger = EpochLedger()

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def _own_argument_error(self, ranks: Topology) -> Exception | None:
        return self._options.error(self.replica, ranks)

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._options = self._options.renumbered(previous)

    def _assign(self, group: RankGroup) -> None:
        self.servers = self._options.owners(group.size)
        self._learn_nodes(group)
        ranks = [rank for rank in range(group.size) if rank not in self.servers]
        self.workers = divide(ranks, self._nodes, self._options.ranks_per_worker)
        self._first_workers = len(self.workers)
        self._own_numbers = list(range(self._first_workers))  # of the workers that remain, before any failed
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

    def rows_error(self, rows: str) -> str:
        if self._options.ranks_per_worker > 1:
            return (
                'updates="async" with ranks_per_worker divides each part of a batch among the ranks of a worker, so it '
                'needs all rows: arrays or a data set; with a loader use ranks_per_worker=1, or updates="sync"'
            )
        return ""

    def make_meter(self, batches: BatchSource) -> Any:
        self._ledger = EpochLedger()
        return super().make_meter(batches)

    def _set_part(self) -> None:
        rank = self.group.rank
        self.part = next((number for number, ranks in enumerate(self.workers) if rank in ranks), None)
        self.parts = self._first_workers  # also after failures: the remaining workers compute all parts of a batch

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        given = self._options
        self._rule = StalenessRule(given.stale, given.max_staleness)
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
            # part `step * parts + own` is batch `step` of a worker; any worker computes any part of whole batches
            begins = [count(own, self.parts) for own in self._own_numbers] if batches.divided else [count()]
            return Dealer(Parts([*map(self._ledger.undealt, begins)]), everyone, 0 if warms_up else bound)
        left = np.flatnonzero(~self._ledger.dealt).tolist()
        return Dealer(Parts([iter(left)], len(left)), everyone[:1] if warms_up else everyone, bound)

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
            worker.announce(Header() if client is None else client.replies[0].header)
            if worker.dealt.kind == WORK:
                rows.prepare(worker.dealt.step)

        run.idle()
        fetch()
        while worker.meet(self._halt(run) != 0).kind != END:
            run.idle()
            if worker.dealt.kind == AGAIN:
                fetch()
                continue
            part = worker.dealt.step
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
                undo_batch(self.replica)  # another rank has no gradients of this part
            return False
        measured[:metrics], measured[metrics + WEIGHT], self._used = sums[:metrics], sums[metrics], sums[metrics + 1 :]
        self._worker.reduce()
        trained = [self._gradients[: self.replica.parameter_count]] if self._worker.leads else []
        self.rule.weigh(measured, trained)
        if self._worker.leads:
            self.rule.transform(trained)
            run.keep_error(self.rule.raise_kept)
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
