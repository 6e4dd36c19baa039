"""The strategy of SpareReplicasTrainer: a step takes the first gradients and does not wait for the slowest ranks.

The chief, rank 0, works in a thread, so that what its rank computes may take its time like any other's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.control import all_values
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica
from trainers.strategies.interface import EpochRun
from trainers.strategies.servers.epoch import HOW_FAR
from trainers.strategies.servers.mailbox import (
    END,
    GRADIENTS,
    NOTHING,
    PUSH,
    WORK,
    Arrival,
    Head,
    Mailbox,
    Parcel,
)
from trainers.strategies.servers.service import Counts, Served, Shard, ended
from trainers.watching.meter import Tally


class Round:
    """What has come for one step.

    used: the first gradients, as many as were wanted, in the order of the workers' numbers.
    others: who came without gradients: it had no rows, or has failed.
    failed: whether somebody has met an error, so that there is no update. stop: whether training shall end after it.
    """

    def __init__(self) -> None:
        self.used: list[Arrival] = []
        self.others: list[Arrival] = []
        self.failed = self.stop = False

    @property
    def everybody(self) -> list[Arrival]:
        return self.used + self.others


def collect(mailbox: Mailbox, step: int, wanted: int, late: Callable[[Arrival], None]) -> Round:
    """Wait until the gradients of `wanted` workers for `step` are there, or one worker has failed.

    late: is given whoever comes meanwhile with what was computed for a step before.
    """
    found = Round()
    while len(found.used) < wanted and not found.failed:
        arrival = mailbox.next(f"get the gradients of step {step + 1}")
        head = arrival.parcel.head
        found.failed |= head.kind != GRADIENTS and bool(head.halt)
        found.stop |= bool(head.halt)
        if head.step != step:
            late(arrival)
        elif head.kind == GRADIENTS:
            found.used.append(arrival)
        else:
            found.others.append(arrival)
    found.used.sort(key=lambda each: each.worker)  # so that sums do not depend on who was first
    return found


CHIEF = 0


class SpareReplicas(Served):
    """See SpareReplicasTrainer. spare: for how many ranks a step does not wait."""

    synchronous = False
    thread = "serve"

    def __init__(self, replica: Replica, name: str, spare: int) -> None:
        super().__init__(replica, name, len(getattr(replica, "metrics", ())) + 1)
        self.spare = self._given = spare
        self._wanted = 0  # ranks whose gradients a step takes
        self._counts = Counts()
        self._begun, self._taken = -1, 0  # the epoch under way, and how many of its steps were taken

    def describe(self) -> str:
        return f"{self.name}({type(self.replica).__name__}, spare={self._given!r})"

    def _refused(self, ranks: Topology) -> Exception | None:
        spare = self._given
        if isinstance(spare, bool) or not isinstance(spare, int | np.integer) or not 0 <= spare < ranks.size:
            return ArgumentError(
                f"spare must be an integer from 0 to {ranks.size - 1}, one less than there are ranks, got {spare!r}"
            )
        return _copy_refusal(self.replica) if ranks.rank == CHIEF else None

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._given = min(self._given, len(previous) - 1)

    def _assign(self, ranks: int) -> None:
        self.servers, self.workers = (CHIEF,), tuple(range(ranks))
        self.spare, self._wanted = int(self._given), ranks - int(self._given)

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        self._values = np.zeros(self._measures)  # this rank's metrics and its share of the batch
        if group.rank == CHIEF:  # where it computes; what the model is bound to is updated meanwhile
            self._own_parameters, self._own_gradients = map(np.zeros_like, (self._parameters, self._gradients))

    def _take_part(self) -> None:
        self.part, self.parts = self.group.rank, self.group.size
        self.spare = max(0, self.group.size - self._wanted)  # a rank that has failed is one that no step waits for

    def _agree_on_progress(self) -> None:
        self._begun, self._taken = all_values(self.group.comm, [self._begun, self._taken], HOW_FAR)[CHIEF]
        if self.group.rank == CHIEF:
            self._own_parameters[:] = self._parameters

    def begin_fit(self) -> None:
        self._begun = -1

    def run_epoch(self, run: EpochRun, number: int) -> None:
        if self._begun != number:
            self._begun, self._taken, self._counts = number, 0, Counts()
        if self._taken == run.batches.steps:
            return
        if self.group.rank == CHIEF:
            self._run_chief(run, number)
        else:
            self._follow(run, number, self.replica, self._parameters, self._gradients)

    def _run_chief(self, run: EpochRun, number: int) -> None:
        """The chief's epoch: it computes as the others do, with a copy of the model, and chiefs beside it."""
        mailbox, shard, queue = self._mailbox, self._shard, self._queue
        assert mailbox is not None
        assert shard is not None
        assert queue is not None
        copied = run.guarded(self._copy)
        chief = Chief(mailbox, shard, self.group.size, self.spare, self._tally, self.span, self._counts)
        chiefing = queue.submit(partial(chief.run, run.batches.sizes().tolist(), self._taken))
        try:
            with ended(chiefing):
                self._follow(run, number, copied or self.replica, self._own_parameters, self._own_gradients)
            self.clock.start()
            chiefing.wait()
            self.clock.stop()
        finally:
            self._taken = chief.done
        run.error = run.error or chief.error
        if copied is not None:
            run.guarded(lambda: self.replica.load_local_state(copied.local_state()))

    def _copy(self) -> Replica:
        """A copy of the chief's replica on memory of its own."""
        copied = self.replica.copy()
        copied.bind_parameters(self._own_parameters)
        copied.bind(self._own_gradients)
        return copied

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return self._logs_of(self._counts)

    def _follow(
        self, run: EpochRun, number: int, replica: Replica, parameters: np.ndarray, gradients: np.ndarray
    ) -> None:
        """A rank's epoch: it computes what the chief says is the newest step.

        replica: computes, bound to these flat `parameters` and `gradients`.
        """
        client, visited = self._client, run.batches.order(number)
        assert client is not None
        step, kind = self._taken, WORK
        while kind == WORK:
            computed = run.guarded(partial(self._compute_part, run, visited, step, replica, gradients))
            halts = run.error is not None or self.stop_training
            head = Head(GRADIENTS if computed else NOTHING, step, halt=halts)
            client.expect(CHIEF)
            client.push([head], gradients if computed else None, self._values)
            client.answered()
            client.take(parameters)
            replica.refresh()
            reply = client.replies[CHIEF]
            self.measured[: self._values.size - 1] = reply.measures[:-1]
            run.guarded(partial(run.end_batch, step))
            kind, step = reply.head.kind, reply.head.step

    def _compute_part(
        self, run: EpochRun, visited: np.ndarray, step: int, replica: Replica, gradients: np.ndarray
    ) -> bool:
        """This rank's gradients of a step; false when it has no rows. May raise anything."""
        self._values[:] = 0
        run.begin_batch(step)
        with self.span("data"):
            batch = run.batches.share(visited, step, self.group.rank)
        if not len(batch.x):
            return False
        with self.span("compute"):
            self._values[:-1] = replica.gradients(*run.checked(batch)[:2], batch.share)
        if run.unusable(gradients, replica):
            self._values[:] = gradients[:] = 0  # of no rows: the chief waits for as many ranks as bring some
            return True
        self._values[:-1] *= batch.share
        self._values[-1] = batch.share
        return True


ROUNDING = 1e-9  # of the sum of all shares


class Chief:
    """One epoch, or what is left of it.

    workers: how many ranks there are. spare: for how many of them a step does not wait.
    tally: measures the steps. span: what is done inside it is named in a trace.

    A push brings the worker's metrics and, last, its share of the batch; a reply the metrics of the last step.
    counts: what is told of the epoch. error: what an update has met. done: how many steps of the epoch were taken.
    """

    def __init__(
        self, mailbox: Mailbox, shard: Shard, workers: int, spare: int, tally: Tally,
        span: Callable[[str], AbstractContextManager[Any]], counts: Counts,
    ) -> None:  # fmt: skip
        self._mailbox, self._shard = mailbox, shard
        self._workers, self._spare = workers, spare
        self._tally, self._span = tally, span
        self._means = np.full(1, np.nan)  # of the last step that was taken; NaN stands for all metrics until then
        self._newest: Parcel | None = None  # what is sent to everyone until the next update
        self.counts = counts
        self.error: Exception | None = None
        self.done = 0

    @np.errstate(all="ignore")  # a model that has diverged has a loss that says so
    def run(self, sizes: Sequence[int], first: int = 0) -> None:
        """Until all ranks have heard that the epoch is over. sizes: the rows of each batch. first: step to begin at."""
        self.done = first
        self._mailbox.open([PUSH])
        self._send_home(self._take_steps(sizes))

    def _take_steps(self, sizes: Sequence[int]) -> list[Arrival]:
        """All steps, or those until somebody ends the epoch; returns who waits for an answer then."""
        for step, rows in list(enumerate(sizes))[self.done :]:
            wanted = max(1, min(rows, self._workers) - self._spare)  # ranks without rows have no gradients
            found = collect(self._mailbox, step, wanted, partial(self._go_on, step))
            if found.failed:
                return found.everybody
            try:
                self._update(found, step, int(rows))
            except Exception as error:  # whatever it is, the other ranks must hear of it
                self.error = error
            self.done = step + 1
            is_last = step == len(sizes) - 1
            if found.stop or self.error is not None or is_last:
                self.counts.cut_short = not is_last
                return found.everybody
            for arrival in found.everybody:
                self._answer(arrival, WORK, step + 1)
        return []

    def _update(self, found: Round, step: int, rows: int) -> None:
        """One step by the mean over the rows that were used."""
        measured = np.sum([arrival.parcel.measures for arrival in found.used], axis=0)
        share, self._newest = float(measured[-1]), None
        if not share:
            return  # every rank has left its gradients out
        summands = [arrival.parcel.body for arrival in found.used]
        with self._span("update"):
            self._shard.add_up(summands, 1.0 if abs(share - 1) < ROUNDING else share)
            self._shard.update()
        self._means = measured[:-1] / share
        self._tally.add(self._means, share * rows, step)

    def _go_on(self, step: int, arrival: Arrival) -> None:
        """A rank is late: have it go on with `step`, the newest."""
        self.counts.dropped += arrival.parcel.head.kind == GRADIENTS
        self._answer(arrival, WORK, step)

    def _send_home(self, waiting: list[Arrival]) -> None:
        """The epoch is over: tell it to every rank that comes, until all have come."""
        self._newest = None
        for arrival in waiting:
            self._answer(arrival, END, 0)
        for _ in range(self._workers - len(waiting)):
            arrival = self._mailbox.next("have the late ranks come in at the end of an epoch")
            self.counts.dropped += arrival.parcel.head.kind == GRADIENTS
            self._answer(arrival, END, 0)
        self._mailbox.drain()

    def _answer(self, arrival: Arrival, kind: int, step: int) -> None:
        """Send a rank the newest parameters, and the metrics of the last step."""
        if self._newest is None:
            self._newest = self._mailbox.parcel()
            self._newest.head = Head(kind, step, self._shard.version)
            self._newest.measures[:-1] = self._means
            self._newest.body[:] = self._shard.parameters
        if kind == WORK:
            self._mailbox.clear(arrival)
        self._mailbox.reply(self._newest, arrival.worker, whole=True)


def _copy_refusal(replica: Replica) -> ArgumentError | None:
    """Why a replica can't be copied."""
    try:
        replica.copy()
    except ArgumentError as error:
        return ArgumentError(f"the chief of spare replicas computes with a copy of the model, and {error}")
    return None
