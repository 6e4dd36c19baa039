"""The chief of spare replicas: it collects the gradients of every step, updates, and says which step is the newest.

It works in the thread of the topology's worker, so that what its rank computes may take its time like any other's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from trainers.strategies.servers.messages import END, GRADIENTS, PUSH, WORK, Head, Parcel
from trainers.strategies.servers.progress import Counts
from trainers.strategies.servers.server import Arrival, Desk, Shard
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


def collect(desk: Desk, step: int, wanted: int, late: Callable[[Arrival], None]) -> Round:
    """Wait until the gradients of `wanted` workers for `step` are there, or one worker has failed.

    late: is given whoever comes meanwhile with what was computed for a step before.
    """
    found = Round()
    while len(found.used) < wanted and not found.failed:
        arrival = desk.next(f"get the gradients of step {step + 1}")
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


ROUNDING = 1e-9  # of the sum of all shares


class Lead:
    """One epoch, or what is left of it.

    workers: how many ranks there are. spare: for how many of them a step does not wait.
    tally: measures the steps. span: what is done inside it is named in a trace.

    A push brings the worker's metrics and, last, its share of the batch; a reply the metrics of the last step.
    counts: what is told of the epoch. error: what an update has met. done: how many steps of the epoch were taken.
    """

    def __init__(
        self, desk: Desk, shard: Shard, workers: int, spare: int, tally: Tally,
        span: Callable[[str], AbstractContextManager[Any]], counts: Counts,
    ) -> None:  # fmt: skip
        self._desk, self._shard = desk, shard
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
        self._desk.open([PUSH])
        self._send_home(self._take_steps(sizes))

    def _take_steps(self, sizes: Sequence[int]) -> list[Arrival]:
        """All steps, or those until somebody ends the epoch; returns who waits for an answer then."""
        for step, rows in list(enumerate(sizes))[self.done :]:
            wanted = max(1, min(rows, self._workers) - self._spare)  # ranks without rows have no gradients
            found = collect(self._desk, step, wanted, partial(self._go_on, step))
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
            arrival = self._desk.next("have the late ranks come in at the end of an epoch")
            self.counts.dropped += arrival.parcel.head.kind == GRADIENTS
            self._answer(arrival, END, 0)
        self._desk.drain()

    def _answer(self, arrival: Arrival, kind: int, step: int) -> None:
        """Send a rank the newest parameters, and the metrics of the last step."""
        if self._newest is None:
            self._newest = self._desk.parcel()
            self._newest.head = Head(kind, step, self._shard.version)
            self._newest.measures[:-1] = self._means
            self._newest.body[:] = self._shard.parameters
        if kind == WORK:
            self._desk.clear(arrival)
        self._desk.reply(self._newest, arrival.worker, whole=True)
