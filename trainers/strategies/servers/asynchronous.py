"""The strategy of ParameterServerTrainer(updates="async"): workers push gradients to servers, which update as gradients
arrive, and deal parts of batches."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, combine, everywhere, together
from trainers.data import Batch, BatchSource
from trainers.group import RankGroup
from trainers.replica import Replica, undo_batch
from trainers.strategies.interface import EpochRun
from trainers.strategies.rule import WEIGHT
from trainers.strategies.servers.mailbox import (
    END,
    ENDED,
    GRADIENTS,
    NOTHING,
    WORK,
    Arrival,
    Client,
    Header,
    Message,
)
from trainers.strategies.servers.options import Options
from trainers.strategies.servers.server import Policy, Server, Shard
from trainers.strategies.servers.service import HOW_FAR, ServerStrategy, wait_before_raising
from trainers.strategies.servers.worker import WorkerRanks

EMPTY, DROPPED = -1, -2  # outcomes of a part that was not applied: no gradients, dropped


class EpochLedger:
    """Records the outcome of each part of the current epoch: the dealt parts of batches, or the steps.

    parts: their number; of a stream that of the parts so far; 0 on workers.
    outcomes: by the number of a part: the staleness of the applied gradient, or EMPTY, DROPPED.
    dealt: the parts that all servers had processed when the epoch began or was continued; they are not dealt again.
    cut_short: whether the epoch was ended before its last part.
    """

    def __init__(self) -> None:
        self.epoch, self.parts, self.cut_short = -1, 0, False
        self.outcomes, self.dealt = dict[int, int](), set[int]()

    def begin(self, epoch: int, parts: int) -> None:
        """Begin epoch `epoch` of `parts` parts, or continue it after a failure. parts: 0 if the number is not known.
        Local."""
        if self.epoch != epoch or (parts and self.parts != parts):
            self.epoch, self.parts, self.cut_short = epoch, parts, False
            self.outcomes, self.dealt = {}, set()

    def undealt(self, numbers: Iterable[int]) -> Iterator[int]:
        """Return those of these numbers whose parts are to be dealt."""
        return (number for number in numbers if number not in self.dealt)

    def note(self, number: int, outcome: int) -> None:
        """Record the outcome of part `number`, unless it has one."""
        self.outcomes.setdefault(number, outcome)
        self.parts = max(self.parts, number + 1)

    @property
    def staleness(self) -> list[int]:
        """The number of gradients that were applied 0, 1, 2, ... updates after their parameters."""
        return np.bincount([each for each in self.outcomes.values() if each >= 0]).tolist()

    @property
    def dropped(self) -> int:
        return [*self.outcomes.values()].count(DROPPED)

    def agree(self, comm: MPI.Intracomm, serves: bool) -> None:
        """After a failure, agree on `dealt`, so that parts which a server lacks are dealt again. Collective.

        serves: whether this rank is a server.
        """
        epoch = max(all_values(comm, self.epoch, HOW_FAR))
        parts = max(all_values(comm, self.parts if self.epoch == epoch else 0, HOW_FAR))
        self.begin(epoch, 0)
        self.parts = parts if serves else 0  # servers may have recorded different numbers of parts of a stream
        done = np.array([not serves or number in self.outcomes for number in range(parts)], bool)
        self.dealt = set(np.flatnonzero(combine(comm, done, HOW_FAR, MPI.LAND)).tolist())


NO_PART = -1  # instead of a part: none is left


class OutstandingPart(NamedTuple):
    """A part that a worker computes: the worker, and the version of the parameters it has."""

    worker: int
    version: int


class Dealer:
    """Deals the parts of one epoch that are left.

    numbers: of the parts, in the order of dealing: one iterator for all workers, or one for each. count: how many they
        are; infinity of a stream, whose end a worker reports.
    workers: the number of workers. bound: the largest staleness, or None for any. With 0 one worker computes at a time,
        all in turn.

    cut_short: whether it was stopped before everything was dealt.
    """

    def __init__(
        self,
        numbers: Sequence[Iterator[int]],
        workers: int,
        bound: int | None = None,
        count: float = math.inf,
    ) -> None:
        self._numbers, self._left = numbers, count
        self._ended = set[int]()  # the iterators whose streams have ended
        self._workers, self._bound = workers, bound
        self._ahead = workers > 1  # a single worker would get parameters that lack its own gradients
        self._outstanding: list[OutstandingPart] = []  # the oldest first
        self.cut_short = False

    def deal(self, worker: int, version: int) -> int | None:
        """Deal the next part to `worker`, which gets the parameters of `version`; the part is outstanding then.

        Returns the part; NO_PART if none is left, None if the worker has to wait.
        """
        own = worker % len(self._numbers)
        if not self._left or own in self._ended:
            return NO_PART
        many = self._bound is not None and len(self._outstanding) > self._bound
        if many or self._is_ahead(worker):
            return None
        self._outstanding.append(OutstandingPart(worker, version))
        self._left -= 1
        return next(self._numbers[own])

    def _is_ahead(self, worker: int) -> bool:
        """Whether a worker still computes, and must not have another part yet.

        Near the end of the epoch no worker gets a second part: a slow worker would keep it from the other workers.
        """
        computes = any(part.worker == worker for part in self._outstanding)
        return computes and (not self._ahead or self._left <= self._workers)

    def stop(self) -> None:
        """Deal nothing more."""
        self.cut_short |= self._left > 0 and len(self._ended) < len(self._numbers)
        self._left = 0

    def may_apply(self, worker: int, version: int) -> bool:
        """Whether the gradients of this worker's oldest part may become update number `version` + 1 now."""
        if self._bound is None:
            return True
        others = list(self._outstanding)
        others.remove(self._oldest(worker))
        return all(version + 1 + position <= part.version + self._bound for position, part in enumerate(others))

    def done(self, worker: int, ended: bool = False) -> None:
        """Remove this worker's oldest part from the outstanding ones. ended: the worker reports the end of its stream,
        so there are no later parts; of arrays they were counted."""
        self._outstanding.remove(self._oldest(worker))
        if ended and self._left == math.inf:
            self._ended.add(worker % len(self._numbers))

    def _oldest(self, worker: int) -> OutstandingPart:
        for part in self._outstanding:
            if part.worker == worker:
                return part
        raise CommunicationError(f"worker {worker} has sent gradients of a part that it was not dealt")


class Asynchronous(Policy):
    """Applies each gradient as it arrives, and deals the next part to whichever worker asks.

    options: how stale gradients are treated.
    dealer: deals the parts on the first server; None on the others. Only the first server guarantees the bound on
        staleness; on the others it may be exceeded by the number of gradients in flight.
    apply: apply(message, factor) updates the shard, with the learning rate times `factor`; it raises nothing.
    halts: whether this rank wants the epoch to end.
    ledger: the outcomes of the parts; a part that has one is not applied again.
    more: of a stream: by how much the number of a part may exceed those in the ledger.
    """

    def __init__(
        self, shard: Shard, options: Options, dealer: Dealer | None, apply: Callable[[Message, float], object],
        halts: Callable[[], bool], ledger: EpochLedger, more: int = 0,
    ) -> None:  # fmt: skip
        self._shard, self._options, self._dealer = shard, options, dealer
        self._apply, self._halts = apply, halts
        self._ledger, self._more = ledger, more
        self._held: list[Arrival] = []  # gradients that would break the bound
        self._taken = 0  # pushes

    @property
    def parts(self) -> int:
        return self._ledger.parts + self._more

    def hear(self, halt: int) -> None:
        if self._dealer is not None and (halt or self._halts()):
            self._dealer.stop()

    def take(self, push: Arrival) -> Sequence[Arrival]:
        """Process held pushes, oldest version first, as far as the bound allows."""
        self._held.append(push)
        processed: list[Arrival] = []
        while ready := next((each for each in sorted(self._held, key=_version) if self._may_apply(each)), None):
            self._held.remove(ready)
            self._process(ready)
            processed.append(ready)
        return processed

    def _may_apply(self, push: Arrival) -> bool:
        nothing = push.message.header.kind != GRADIENTS
        return nothing or self._dealer is None or self._dealer.may_apply(push.worker, self._shard.version)

    def _process(self, push: Arrival) -> None:
        header = push.message.header
        if self._dealer is not None:
            self._dealer.done(push.worker, header.kind == ENDED)
        outcome = EMPTY
        if header.kind == GRADIENTS and header.step not in self._ledger.outcomes:
            outcome = self._shard.version - header.version
            factor = self._options.factor(outcome)
            if factor:
                self._apply(push.message, factor)
            else:
                outcome = DROPPED
        self._ledger.note(header.step, outcome)
        self._taken += 1

    def answer(self, request: Arrival) -> Header | None:
        """Deal a part. Servers without a dealer reply only after as many pushes as the first server had processed,
        because a request may overtake gradients of other workers."""
        part: int | None = 0
        if self._dealer is not None:
            part = self._dealer.deal(request.worker, self._shard.version)
        elif self._taken < request.message.header.taken:
            return None
        if part == NO_PART:
            return Header(END)
        if part is None:
            return None
        return Header(WORK, part, self._shard.version, int(self._halts()), self._taken)


def _version(push: Arrival) -> int:
    return push.message.header.version


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
        super().__init__(replica, name)
        self._used = np.zeros(0)  # of each of Replica.optional: the ranks of this worker that have a gradient for it
        self._options = options
        self._ledger = EpochLedger()

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items())
        return f"{self.name}({type(self.replica).__name__}, {options})"

    def argument_error(self, ranks: Topology) -> Exception | None:
        return super().argument_error(ranks) or self._options.error(self.replica, ranks)

    def _assign(self, group: RankGroup) -> None:
        self.servers = self._options.owners(group.size)
        ranks = [rank for rank in range(group.size) if rank not in self.servers]
        size = self._options.ranks_per_worker
        self.workers = tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))
        self._first_workers = len(self.workers)
        self._own_numbers = list(range(self._first_workers))  # of the workers that remain, before any failed

    def follow(self, previous: tuple[int, ...]) -> None:
        numbered = zip(self._own_numbers, self.workers, strict=True)
        self._own_numbers = [number for number, ranks in numbered if not set(ranks).isdisjoint(previous)]
        super().follow(previous)

    def _join_worker(self) -> None:
        if self._options.ranks_per_worker == 1:
            return
        group = self.group
        mine = next((ranks for ranks in self.workers if group.rank in ranks), self.servers)
        number = self.workers.index(mine) if mine in self.workers else len(self.workers)
        part = group.topology.split(number)
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

    def _agree_on_progress(self) -> None:
        self._ledger.agree(self.group.comm, self._shard is not None)

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
                self.share_parameters()
            raise
        self.share_parameters()
        if streams:
            self._learn_sizes(run, number, self._ledger.cut_short)

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return self._logs_of(self._ledger.staleness, self._ledger.dropped, self._ledger.cut_short)

    def _serve(self, run: EpochRun, number: int) -> None:
        everyone, dealer = range(len(self.workers)), None
        if self.group.rank == self.servers[0]:
            dealer = self._dealer(run.batches, number)

        more = 4 * self.parts * len(everyone) if run.batches.streams else 0  # a worker has at most two parts
        apply = partial(self._apply, run)
        policy = Asynchronous(
            self._shard, self._options, dealer, apply, lambda: self._halt(run) != 0, self._ledger, more
        )
        Server(self._mailbox, self._shard).serve(policy, everyone)
        self._ledger.cut_short = dealer is not None and dealer.cut_short

    def _dealer(self, batches: BatchSource, number: int) -> Dealer:
        """Return the dealer of epoch `number`. In the warm-up no gradient is stale."""
        workers, bound = len(self.workers), 0 if number < self._options.warm_up else self._options.bound
        if batches.streams:
            # part `step * parts + own` is batch `step` of a worker; any worker computes any part of whole batches
            begins = [count(own, self.parts) for own in self._own_numbers] if batches.divided else [count()]
            return Dealer([*map(self._ledger.undealt, begins)], workers, bound)
        left = [*self._ledger.undealt(range(self._ledger.parts))]
        return Dealer([iter(left)], workers, bound, len(left))

    def _apply(self, run: EpochRun, message: Message, factor: float) -> None:
        """Update this server's slice by the gradients in `message`, and call the callbacks. `run` keeps errors."""
        step, metrics = message.header.step // self.parts, len(self.replica.metrics)

        def update() -> None:
            run.begin_batch(step)
            self.replica.still = message.measures[metrics:] == 0
            with self.clock.span("update"):
                self._shard.apply(message.body, factor)
            self.measured[:metrics] = message.measures[:metrics]
            run.end_batch(step)

        run.keep_error(update)

    def _work(self, run: EpochRun, number: int) -> None:
        """Run an epoch on a rank of a worker: its leader gets parts from the servers and pushes their gradients, and
        all ranks compute them."""
        client, worker = self._client, self._worker
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

        fetch()
        while worker.meet(self._halt(run) != 0).kind != END:
            part = worker.dealt.step
            versions = [] if client is None else client.copy_parameters(self._parameters)
            worker.share_parameters()
            self.replica.refresh()
            coming = self._queue.submit(fetch)
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
