"""The strategy of SpareReplicasTrainer: a step takes the first gradients and does not wait for the slowest ranks.

The chief on rank 0 serves in a second thread, so that a slow computation on rank 0 does not delay the steps.
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
from trainers.replica import Replica, attach, copy_of
from trainers.strategies.interface import EpochRun
from trainers.strategies.servers.mailbox import END, ENDED, FAILED, GRADIENTS, NOTHING, STOP, WORK, Arrival, Header
from trainers.strategies.servers.server import Policy, Server, Shard
from trainers.strategies.servers.service import HOW_FAR, SIZES, ServerStrategy, wait_before_raising
from trainers.watching.meter import Tally

CHIEF = 0
ROUNDING = 1e-9  # a sum of shares this close to 1 counts as 1


class First(Policy):
    """Takes a step by the first gradients that arrive, and drops those that come later.

    workers: the number of ranks. spare: for how many of them a step does not wait. first: the first step. steps: of the
        epoch, or None. divided: the ranks have different rows of a stream. holders: returns the number of ranks that
        have rows of a step, or None. begin_step: sets the learning rates of a step. span: as Stopwatch.span.

    A push carries a rank's metrics, whether it has gradients for each of Replica.optional, and the mean weight, all
    multiplied by the rank's share of the batch, as the gradients are; then the share and the rows of the batch. Of
    divided rows the share and the rows are those of the rank, and the gradients are not multiplied.

    done: the number of steps taken. sizes: the rows of these steps. dropped: the number of gradients that were not
        used. cut_short: whether the epoch was ended before its last step. error: of an update, or None.
    """

    def __init__(
        self, shard: Shard, tally: Tally, workers: int, spare: int, *, first: int, steps: int | None, divided: bool,
        holders: Callable[[int], int] | None, begin_step: Callable[[int], None],
        span: Callable[[str], AbstractContextManager[Any]],
    ) -> None:  # fmt: skip
        self._shard, self._tally, self._workers, self._spare = shard, tally, workers, spare
        self._steps, self._divided, self._holders = steps, divided, holders
        self._begin_step, self._span = begin_step, span
        self.means = np.full(1, np.nan)  # the metrics of the last step that was taken; one NaN before the first step
        self.done, self.dropped, self.sizes = first, 0, list[int]()
        self.error: Exception | None = None
        self.cut_short = self.over = self._stops = self._failed = False
        self._ended = set[int]()  # workers whose streams have ended
        self._busy = set[int]()  # workers that compute, or have pushed for the next step
        self._used: list[Arrival] = []  # pushes for the next step, with gradients
        self._others: list[Arrival] = []  # without: the worker has no rows, or met an error

    @property
    def parts(self) -> int:
        return self.done + 1

    def hear(self, halt: int) -> None:
        self._stops |= halt == STOP
        self._failed |= halt == FAILED

    def take(self, push: Arrival) -> Sequence[Arrival]:
        header = push.message.header
        late = self.over or header.step != self.done
        if header.kind == ENDED and (self._divided or not late):
            self._ended.add(push.worker)
        if late:
            self.dropped += header.kind == GRADIENTS
            self._busy.discard(push.worker)
            return [push]
        (self._used if header.kind == GRADIENTS else self._others).append(push)
        if not self._failed and not self._is_enough():
            return []
        pushes = self._used + self._others
        if self._failed or not self._used:
            self.over = True
        else:
            self._take_step()
        self._used, self._others = [], []
        self._busy.difference_update(push.worker for push in pushes)
        return pushes

    def _is_enough(self) -> bool:
        """Whether the next step takes the gradients that are there. Ranks without rows have none."""
        if self._divided:
            active = self._workers - len(self._ended)
            return not active or len(self._used) >= max(1, active - self._spare)
        rows = self._rows()
        holders = min(rows, self._workers) if self._holders is None else self._holders(self.done)
        return bool(self._ended) or (rows > 0 and len(self._used) >= max(1, holders - self._spare))

    def _rows(self) -> int:
        """Return the rows of the batch of the next step; of divided rows the used ones."""
        rows = [int(push.message.measures[-1]) for push in self._used + self._others]
        return sum(rows) if self._divided else max(rows)

    def _take_step(self) -> None:
        self._used.sort(key=lambda push: push.worker)  # so that the sum does not depend on the order of arrival
        self.sizes.append(self._rows())
        try:
            self._update(self.sizes[-1])
        except Exception as error:  # any exception: it must reach the other ranks
            self.error = error
        self.done += 1
        is_last = self.done == self._steps
        self.over = is_last or self._stops or self.error is not None
        self.cut_short = self.over and not is_last

    def _update(self, rows: int) -> None:
        """Update the parameters by the mean gradient over the rows that were used. rows: of the batch."""
        *sums, share, _ = np.sum([push.message.measures for push in self._used], axis=0)
        if not share:
            return  # every rank has discarded its gradients
        self._begin_step(self.done)
        with self._span("update"):
            bodies = [push.message.body for push in self._used]
            if self._divided:
                for push, body in zip(self._used, bodies, strict=True):
                    body *= body.dtype.type(push.message.measures[-2] / share)
            self._shard.add_up(bodies, 1.0 if self._divided or abs(share - 1) < ROUNDING else share)
            self.means = self._shard.weigh(np.array(sums) / share)
            self._shard.transform_and_update()
        self._tally.add(self.means, share if self._divided else share * rows, self.done)

    def answer(self, request: Arrival) -> Header | None:
        """Reply with the next step, but not before the step for which the worker has pushed, or is about to push: a
        request may overtake gradients."""
        if request.worker in self._busy:
            return None
        if self.over:
            return Header(END, self.done, self._shard.version)
        self._busy.add(request.worker)
        return Header(WORK, self.done, self._shard.version)


class SpareReplicas(ServerStrategy):
    """The strategy of SpareReplicasTrainer. spare: the number of ranks for which a step does not wait."""

    rates_follow_batches = False  # the chief sets the rates of the step that it takes
    thread = "serve"
    extra = 3  # see First

    def __init__(self, replica: Replica, name: str, spare: int) -> None:
        super().__init__(replica, name)
        self.spare = self._given = spare
        self._wanted = 0  # ranks whose gradients a step takes
        self._begun, self._taken = -1, 0  # the current epoch, and the number of its steps that were taken
        self._complete = False  # whether all steps of the current epoch were taken
        # on the chief, of the current epoch: the gradients that were dropped, and the rows of its steps
        self._dropped, self._cut_short, self._sizes = 0, False, list[int]()
        self._own_step = 0  # the next batch of this rank in the current epoch, if the rows are divided

    def describe(self) -> str:
        return f"{self.name}({type(self.replica).__name__}, spare={self._given!r})"

    def argument_error(self, ranks: Topology) -> Exception | None:
        spare = self._given
        if error := super().argument_error(ranks):
            return error
        if not is_integer(spare, 0, ranks.size - 1):
            return ArgumentError(
                f"spare must be an integer from 0 to {ranks.size - 1}, the number of ranks less one, got {spare!r}"
            )
        try:
            if ranks.rank == CHIEF:
                copy_of(self.replica)
        except ArgumentError as error:
            return ArgumentError(f"the chief of spare replicas computes with a copy of the model, and {error}")
        return None

    def _assign(self, group: RankGroup) -> None:
        self.servers, self.workers = (CHIEF,), tuple((rank,) for rank in range(group.size))
        self.spare, self._wanted = int(self._given), group.size - int(self._given)

    def connect(self, group: RankGroup) -> None:
        super().connect(group)
        self._values = np.zeros(self._measures)  # of the next push, see First
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

    def make_meter(self, batches: BatchSource) -> Any:
        self._begun = -1
        return super().make_meter(batches)

    def run_epoch(self, run: EpochRun, number: int) -> None:
        batches = run.batches
        if self._begun != number:
            if batches.streams:
                run.begin_stream(number, 0)
            self._begun, self._taken, self._complete, self._own_step = number, 0, False, 0
            self._dropped, self._cut_short, self._sizes = 0, False, []
        # a failure may come after the last step, while the chief ends the epoch
        if not self._complete and self._taken != batches.planned:
            if self.group.rank == CHIEF:
                self._lead(run, number)
            else:
                self._work(run, number, self.replica, self._parameters, self._gradients)
        self._complete = True
        if batches.streams:
            sizes = root_value(self.group.comm, self._sizes, SIZES, CHIEF)
            self._learn_sizes(run, number, self._cut_short, sizes)

    def _lead(self, run: EpochRun, number: int) -> None:
        """Run an epoch on rank 0: compute with a copy of the model, like any rank, while the second thread serves."""
        batches, copied = run.batches, run.keep_error(self._copy)
        begun = batches.total(number, 0)
        policy = First(
            self._shard,
            self._tally,
            self.group.size,
            self.spare,
            first=self._taken,
            steps=batches.planned,
            divided=batches.divided,
            holders=None if batches.streams else partial(self._holders, batches),
            begin_step=lambda step: self.rule.begin_step(begun + step),
            span=self.clock.span,
        )
        server = Server(self._mailbox, self._shard)
        future = self._queue.submit(partial(server.serve, policy, range(self.group.size)))
        try:
            with wait_before_raising(future):
                self._work(run, number, copied or self.replica, self._own_parameters, self._own_gradients)
            self.clock.start()
            future.wait()
            self.clock.stop()
        finally:
            self._taken, self._cut_short = policy.done, policy.cut_short
            self._dropped += policy.dropped
            self._sizes += policy.sizes
        run.error = run.error or policy.error
        if copied is not None:
            run.keep_error(lambda: self.replica.load_local_state(copied.local_state()))

    def _holders(self, batches: BatchSource, step: int) -> int:
        """Return the number of ranks that have rows of a batch. Local."""
        return sum(batches.part_rows(step, part, self.parts) > 0 for part in range(self.parts))

    def _copy(self) -> Replica:
        """Copy the chief's replica, and bind the copy to separate memory. Local."""
        copied = copy_of(self.replica)
        copied.undoable = self.replica.undoable
        attach(copied, self._own_parameters, self._own_gradients)
        return copied

    def end_epoch(self) -> dict[str, Any]:
        self._collect_tally()
        return self._logs_of([], self._dropped, self._cut_short)

    def _work(
        self, run: EpochRun, number: int, replica: Replica, parameters: np.ndarray, gradients: np.ndarray
    ) -> None:
        """Run an epoch on a worker: compute the step that the chief names as the newest, until the chief ends the
        epoch.

        replica: computes the gradients; it is bound to the flat arrays `parameters` and `gradients`.
        """
        client = self._client
        client.begin()
        (reply,), metrics = client.replies, len(replica.metrics)
        client.fetch(self._halt(run))
        client.copy_parameters(parameters)  # this rank may be late, and the step, or the end, not the first one
        replica.refresh()
        while reply.header.kind == WORK:
            step = reply.header.step
            kind = run.keep_error(partial(self._compute_part, run, number, step, replica, gradients))
            kind = NOTHING if kind is None else kind
            header = Header(kind, step, reply.header.version, self._halt(run))
            client.push([header], gradients if kind == GRADIENTS else None, self._values)
            client.fetch(self._halt(run))
            client.copy_parameters(parameters)
            replica.refresh()
            self.measured[:metrics] = reply.measures[:metrics]
            run.keep_error(partial(run.end_batch, step))
        client.bye()

    def _compute_part(self, run: EpochRun, number: int, step: int, replica: Replica, gradients: np.ndarray) -> int:
        """Compute this rank's gradients of `step` of epoch `number` into `gradients`, and set `_values`. Returns the
        kind of the push. May raise any exception."""
        self._values[:] = 0
        with self.clock.span("data"):
            batch = self._batch(run.batches, number, step)
        if batch is None:
            return ENDED
        self._values[-1] = batch.rows
        run.begin_batch(step)
        if not batch.own:
            return NOTHING
        own = self._values[:-1]
        share = 1.0 if run.batches.divided else batch.share
        with self.clock.span("compute"):
            metrics = self.rule.gradients(run.check_batch(batch), share, gradients, replica)
            own[:] = [*metrics, *~self.rule.unused, self.rule.weight / share, 1.0]
        own *= batch.share
        if run.discard_if_unusable(gradients, replica):
            # zeros with share 0, not nothing: the chief waits for a fixed number of gradients
            own[:] = gradients[:] = 0
        return GRADIENTS

    def _batch(self, batches: BatchSource, number: int, step: int) -> Batch | None:
        """Return this rank's rows of a step; None if its stream has ended. The share of divided rows is their number. A
        late rank goes on with its own next batch if the rows are divided."""
        if not batches.streams:
            return batches.share(number, step, self.group.rank)
        step = self._own_step if batches.divided else step
        batch, rows = batches.share(number, step, self.part), batches.seen[step][0]
        if batches.divided:
            self._own_step += rows > 0
            return batch._replace(rows=rows, share=float(rows)) if rows else None
        return batch._replace(rows=rows, share=batch.own / rows) if rows else None
