"""The strategy of SpareReplicasTrainer: a step takes the first gradients and does not wait for the slowest ranks.

The chief on rank 0 runs in a second thread, so that a slow computation on rank 0 does not delay the steps.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.control import all_values, root_value
from trainers.arguments import is_integer
from trainers.data import Batch, BatchSource
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica
from trainers.strategies.interface import EpochRun
from trainers.strategies.servers.epoch import HOW_FAR
from trainers.strategies.servers.mailbox import (
    END,
    ENDED,
    FAILED,
    GRADIENTS,
    NOTHING,
    PUSH,
    WORK,
    Arrival,
    Header,
    Mailbox,
    Message,
)
from trainers.strategies.servers.service import SIZES, Counts, ServerStrategy, Shard, wait_before_raising
from trainers.watching.meter import Tally


class Round:
    """The pushes received for one step.

    used: the first gradients, as many as are enough, sorted by worker number.
    others: pushes without gradients: the worker had no rows, or met an error.
    failed: whether a worker met an error; then there is no update. stop: whether a worker asked to end the training.
    """

    def __init__(self) -> None:
        self.used: list[Arrival] = []
        self.others: list[Arrival] = []
        self.failed = self.stop = False

    @property
    def arrivals(self) -> list[Arrival]:
        return self.used + self.others

    def hear(self, header: Header) -> None:
        """Set `failed` and `stop` by a push of this step, or of a late worker."""
        self.failed |= header.halt == FAILED
        self.stop |= bool(header.halt)


def receive_round(
    mailbox: Mailbox, step: int, enough: Callable[[Round], bool], late: Callable[[Arrival], None]
) -> Round:
    """Wait until `enough` gradients for `step` are there, or one worker has failed.

    late: called with each push that was computed for an earlier step.
    """
    found = Round()
    while not found.failed and not enough(found):
        arrival = mailbox.next(f"get the gradients of step {step + 1}")
        header = arrival.message.header
        found.hear(header)
        if header.step != step:
            late(arrival)
        elif header.kind == GRADIENTS:
            found.used.append(arrival)
        else:
            found.others.append(arrival)
    found.used.sort(key=lambda each: each.worker)  # so that the sum does not depend on the order of arrival
    return found


CHIEF = 0


class SpareReplicas(ServerStrategy):
    """The strategy of SpareReplicasTrainer. spare: the number of ranks for which a step does not wait."""

    synchronous = False
    thread = "serve"

    def __init__(self, replica: Replica, name: str, spare: int) -> None:
        super().__init__(replica, name, len(getattr(replica, "metrics", ())) + getattr(replica, "optional", 0) + 2)
        self.spare = self._given = spare
        self._wanted = 0  # ranks whose gradients a step takes
        self._counts = Counts()
        self._begun, self._taken = -1, 0  # the current epoch, and the number of its steps that were taken
        self._complete = False  # whether all steps of the current epoch were taken
        self._sizes: list[int] = []  # on the chief: the rows of the current epoch's steps, if they are a stream
        self._own_step = 0  # the next batch of this rank in the current epoch, if the rows are divided

    def describe(self) -> str:
        return f"{self.name}({type(self.replica).__name__}, spare={self._given!r})"

    def _own_argument_error(self, ranks: Topology) -> Exception | None:
        spare = self._given
        if not is_integer(spare, 0, ranks.size - 1):
            return ArgumentError(
                f"spare must be an integer from 0 to {ranks.size - 1}, the number of ranks less one, got {spare!r}"
            )
        return _copy_error(self.replica) if ranks.rank == CHIEF else None

    def renumber(self, previous: tuple[int, ...]) -> None:
        self._given = min(self._given, len(previous) - 1)

    def _assign(self, group: RankGroup) -> None:
        self.servers, self.workers = (CHIEF,), tuple((rank,) for rank in range(group.size))
        self.spare, self._wanted = int(self._given), group.size - int(self._given)

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        self._values = np.zeros(self._measures)  # of the next push, see Chief
        self._nothing, self._rows = NOTHING, 0  # of the next push: its kind without gradients, the rows of the batch
        # rank 0 computes in these arrays; the chief's thread updates the arrays that the model is bound to
        if group.rank == CHIEF:
            self._own_parameters, self._own_gradients = map(np.zeros_like, (self._parameters, self._gradients))

    def _set_part(self) -> None:
        self.part, self.parts = self.group.rank, self.group.size
        self.spare = max(0, self.group.size - self._wanted)  # a failed rank counts as a spare one

    def _agree_on_progress(self) -> None:
        progress = [self._begun, self._taken, self._complete]
        begun, self._taken, self._complete = all_values(self.group.comm, progress, HOW_FAR)[CHIEF]
        if begun != self._begun:  # the chief has begun an epoch, and the failure kept this rank from it
            self._begun, self._own_step = begun, 0
        if self.group.rank == CHIEF:
            self._own_parameters[:] = self._parameters

    def begin_fit(self) -> None:
        self._begun = -1

    def begin_step(self, total: int) -> None:
        """Does nothing: the chief sets the learning rates of the step that it takes."""

    def run_epoch(self, run: EpochRun, number: int) -> None:
        if self._begun != number:
            if run.batches.streams:
                run.begin_stream(number, 0)
            self._begun, self._taken, self._counts = number, 0, Counts()
            self._complete, self._sizes, self._own_step = False, [], 0
        # a failure may come after the last step, while the chief ends the epoch
        if not self._complete and self._taken != run.batches.planned:
            if self.group.rank == CHIEF:
                self._run_chief(run, number)
            else:
                self._run_worker(run, number, self.replica, self._parameters, self._gradients)
        self._complete = True
        if run.batches.streams:
            sizes = root_value(self.group.comm, self._sizes, SIZES, CHIEF)
            self._learn_sizes(run, number, self._counts.cut_short, sizes)

    def _run_chief(self, run: EpochRun, number: int) -> None:
        """Run an epoch on rank 0: compute with a copy of the model, like any rank, while the second thread runs the
        Chief."""
        mailbox, shard, queue = self._mailbox, self._shard, self._queue
        assert mailbox is not None
        assert shard is not None
        assert queue is not None
        copied = run.keep_error(self._copy)
        first = run.batches.total(number, 0)

        def begin(step: int) -> None:
            self.rule.begin_step(first + step)

        ends = mailbox, shard, self.group.size, self.spare, self._tally, self.span, self._counts, begin
        batches, chief = run.batches, Chief(*ends)
        if batches.streams:
            chief = StreamChief(*ends, batches.planned, batches.divided, self._sizes)
        else:
            chief.plan(batches.sizes().tolist(), partial(self._holders, batches))
        future = queue.submit(partial(chief.run, self._taken))
        try:
            with wait_before_raising(future):
                self._run_worker(run, number, copied or self.replica, self._own_parameters, self._own_gradients)
            self.clock.start()
            future.wait()
            self.clock.stop()
        finally:
            self._taken = chief.done
        run.error = run.error or chief.error
        if copied is not None:
            run.keep_error(lambda: self.replica.load_local_state(copied.local_state()))

    def _holders(self, batches: BatchSource, step: int) -> int:
        """Return the number of ranks that have rows of a batch. Local."""
        return sum(batches.part_rows(step, part, self.parts) > 0 for part in range(self.parts))

    def _copy(self) -> Replica:
        """Copy the chief's replica, and bind the copy to separate memory. Local."""
        copied = self.replica.copy()
        copied.undoable = self.replica.undoable
        copied.bind_parameters(self._own_parameters)
        copied.bind(self._own_gradients)
        return copied

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return self._logs_of(self._counts)

    def _run_worker(
        self, run: EpochRun, number: int, replica: Replica, parameters: np.ndarray, gradients: np.ndarray
    ) -> None:
        """Run an epoch on a worker: compute the step that the chief names as the newest, until the chief ends the
        epoch.

        replica: computes the gradients; it is bound to the flat arrays `parameters` and `gradients`.
        """
        client = self._client
        assert client is not None
        step, kind = self._taken, WORK
        while kind == WORK:
            computed = run.keep_error(partial(self._compute_part, run, number, step, replica, gradients))
            halt = FAILED if run.error is not None else int(self.stop_training)
            header = Header(GRADIENTS if computed else self._nothing, step, halt=halt, taken=self._rows)
            client.post_receive(CHIEF)
            client.push([header], gradients if computed else None, self._values)
            client.wait_for_replies()
            client.copy_parameters(parameters)
            replica.refresh()
            reply = client.replies[CHIEF]
            metrics = len(replica.metrics)
            self.measured[:metrics] = reply.measures[:metrics]
            run.keep_error(partial(run.end_batch, step))
            kind, step = reply.header.kind, reply.header.step

    def _compute_part(self, run: EpochRun, number: int, step: int, replica: Replica, gradients: np.ndarray) -> bool:
        """Compute this rank's gradients of `step` of epoch `number` into `gradients`. Returns False if it has no rows.
        May raise any exception."""
        self._values[:], self._nothing, self._rows = 0, NOTHING, 0
        with self.span("data"):
            batch = self._batch(run.batches, number, step)
        if batch is None:
            return False
        run.begin_batch(step)
        if not batch.own:
            return False
        # the chief weighs the gradients of a stream's batch, because 16-bit floats may not hold them times the rows
        share = 1.0 if run.batches.streams else batch.share
        with self.span("compute"):
            metrics = self.rule.gradients(run.check_batch(batch), share, gradients, replica)
            self._values[:] = [*metrics, *~self.rule.unused, self.rule.weight / share, 1.0]
        if run.discard_if_unusable(gradients, replica):
            # zeros with share 0, not nothing: the chief waits for a fixed number of gradients
            self._values[:] = gradients[:] = 0
            return True
        self._values *= batch.share
        return True

    def _batch(self, batches: BatchSource, number: int, step: int) -> Batch | None:
        """Return this rank's rows of a step; None if its stream has ended. The share of a stream's batch is the number
        of this rank's rows, and `_rows` is set to the number of all. A late rank goes on with its own next batch if the
        rows are divided."""
        if not batches.streams:
            return batches.share(number, step, self.group.rank)
        batch = batches.part_of(self._own_step if batches.divided else step, self.part)
        if batch is None:
            self._nothing = ENDED
            return None
        self._own_step, self._rows = self._own_step + 1, batch.rows
        return batch._replace(share=float(batch.own))


ROUNDING = 1e-9  # a sum of shares this close to 1 counts as 1


class Chief:
    """Receives the gradients of one epoch (or of the rest of one), updates the parameters and replies to the workers.

    workers: the number of ranks. spare: the number of ranks for which a step does not wait.
    tally: accumulates the metrics of the steps. span: as Strategy.span. begin_step: sets the learning rates of a step
        of the epoch.

    A push carries the worker's metrics, then whether it has gradients for each of Replica.optional, and the mean weight
    that its loss has counted, all times its share of the batch, and this share. A reply carries the metrics of the last
    step.
    counts: the counts of the epoch for the history. error: the error of an update, or None. done: the number of steps
        taken.
    """

    def __init__(
        self, mailbox: Mailbox, shard: Shard, workers: int, spare: int, tally: Tally,
        span: Callable[[str], AbstractContextManager[Any]], counts: Counts, begin_step: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._mailbox, self._shard = mailbox, shard
        self._workers, self._spare = workers, spare
        self._tally, self._span, self._begin_step = tally, span, begin_step
        self._means = np.full(1, np.nan)  # the metrics of the last step that was taken; one NaN before the first step
        self._newest: Message | None = None  # the reply that holds the current parameters; None after an update
        self.counts = counts
        self.error: Exception | None = None
        self.done = 0
        self._steps: int | None = None  # of the epoch, if known
        self._rows: Sequence[int] = ()  # of each batch

    def plan(self, sizes: Sequence[int], holders: Callable[[int], int]) -> None:
        """Set the steps of the epoch. sizes: rows of each batch. holders: returns the number of ranks that have rows of
        a batch."""
        self._steps, self._rows, self._holders = len(sizes), sizes, holders

    @np.errstate(all="ignore")  # a diverged model shows in the loss; NumPy's warnings add nothing
    def run(self, first: int) -> None:
        """Run the steps from `first` on; return when every rank has received the end of the epoch."""
        self.done = first
        self._mailbox.open([PUSH])
        self._end_epoch(self._take_steps())

    def _take_steps(self) -> list[Arrival]:
        """Take the remaining steps, or stop when a worker ends the epoch. Returns the pushes that have no reply yet."""
        while self.done != self._steps:
            found = receive_round(self._mailbox, self.done, self._is_enough, self._answer_late)
            if found.failed or not found.used:
                return found.arrivals
            self._take(found)
            is_last = self.done == self._steps
            if found.stop or self.error is not None or is_last:
                self.counts.cut_short = not is_last
                return found.arrivals
            for arrival in found.arrivals:
                self._answer(arrival, WORK)
        return []

    def _is_enough(self, found: Round) -> bool:
        """Whether a step takes the gradients that are there. Ranks without rows have no gradients."""
        return len(found.used) >= max(1, self._holders(self.done) - self._spare)

    def _take(self, found: Round, rows: int | None = None) -> None:
        """Take a step. rows: of the batch, if its share is 1."""
        try:
            self._update(found, self.done, int(self._rows[self.done]) if rows is None else rows)
        except Exception as error:  # any exception: it must reach the other ranks
            self.error = error
        self.done += 1

    def _update(self, found: Round, step: int, rows: int) -> None:
        """Update the parameters by the mean gradient over the rows that were used."""
        measured = np.sum([arrival.message.measures for arrival in found.used], axis=0)
        share, self._newest = float(measured[-1]), None
        if not share:
            return  # every rank has discarded its gradients
        self._begin_step(step)
        with self._span("update"):
            self._add_up(found.used, share)
            self._means = self._shard.weigh(measured[:-1] / share)
            self._shard.clip_and_update()
        self._tally.add(self._means, share * rows, step)

    def _add_up(self, used: Sequence[Arrival], share: float) -> None:
        """Add up gradients, each times its share of the batch. share: the sum of their shares."""
        self._shard.add_up([each.message.body for each in used], 1.0 if abs(share - 1) < ROUNDING else share)

    def _answer_late(self, arrival: Arrival) -> None:
        """Count late gradients as dropped, and tell their rank to continue with the newest step."""
        self.counts.dropped += arrival.message.header.kind == GRADIENTS
        self._answer(arrival, WORK)

    def _end_epoch(self, waiting: list[Arrival]) -> None:
        """Send END to every rank; wait for the pushes of the late ones."""
        self._newest = None
        for arrival in waiting:
            self._answer(arrival, END)
        for _ in range(self._workers - len(waiting)):
            arrival = self._mailbox.next("receive the pushes of the late ranks at the end of an epoch")
            self.counts.dropped += arrival.message.header.kind == GRADIENTS
            self._answer(arrival, END)
        self._mailbox.drain()

    def _answer(self, arrival: Arrival, kind: int) -> None:
        """Send a rank the newest parameters, the next step, and the metrics of the last one."""
        if self._newest is None:
            self._newest = self._mailbox.message()
            self._newest.header = Header(kind, self.done, self._shard.version)
            self._newest.measures[:] = np.nan
            self._newest.measures[: self._means.size] = self._means
            self._newest.body[:] = self._shard.parameters
        if kind == WORK:
            self._mailbox.clear(arrival)
        self._mailbox.reply(self._newest, arrival.worker, with_body=True)


class StreamChief(Chief):
    """The chief of an epoch of a stream, whose sizes come with pushes: `taken` in the header of a push is the number
    of rows of the rank's batch, and the share is the number of the rank's rows.

    planned: the steps of the epoch, if they are limited. divided: whether each rank has other rows; the epoch then ends
        when all streams have. sizes: a list that gets the rows of each step.
    """

    def __init__(self, *ends: Any) -> None:
        *others, planned, self._divided, self._sizes = ends
        super().__init__(*others)
        self._steps = planned
        self._ended: set[int] = set()  # workers whose streams have ended

    def _take(self, found: Round, rows: int | None = None) -> None:
        self._sizes.append(self._rows_of(found))
        super()._take(found, 1)

    def _rows_of(self, found: Round) -> int:
        """Return the rows of the batch of a step; of divided rows the used ones."""
        if self._divided:
            return sum(arrival.message.header.taken for arrival in found.used)
        return max((arrival.message.header.taken for arrival in found.arrivals), default=0)

    def _add_up(self, used: Sequence[Arrival], share: float) -> None:
        """As Chief._add_up, for gradients that are not multiplied by their shares yet."""
        for each in used:
            body = each.message.body
            body *= body.dtype.type(each.message.measures[-1] / share)
        self._shard.add_up([each.message.body for each in used])

    def _answer_late(self, arrival: Arrival) -> None:
        if self._divided:
            self._note_ends([arrival])
        super()._answer_late(arrival)

    def _note_ends(self, arrivals: Sequence[Arrival]) -> None:
        self._ended |= {each.worker for each in arrivals if each.message.header.kind == ENDED}

    def _is_enough(self, found: Round) -> bool:
        self._note_ends(found.others)
        if not self._divided:
            rows = self._rows_of(found)
            wanted = max(1, min(rows, self._workers) - self._spare)
            return bool(self._ended) or (rows > 0 and len(found.used) >= wanted)
        active = self._workers - len(self._ended)
        return not active or len(found.used) >= max(1, active - self._spare)


def _copy_error(replica: Replica) -> ArgumentError | None:
    """Return the error if the chief's replica can't be copied, or None."""
    try:
        replica.copy()
    except ArgumentError as error:
        return ArgumentError(f"the chief of spare replicas computes with a copy of the model, and {error}")
    return None
