"""Steps of workers and servers that all of them take together."""

from functools import partial
from typing import Any

import numpy as np

from allreduce.transport.control import all_values, combine
from trainers.data import Batch
from trainers.fit.loop import Fit
from trainers.strategies.servers.messages import GRADIENTS, MEET, NOTHING, PUSH, WORK, Head, Parcel
from trainers.strategies.servers.progress import HOW_FAR, Parts, Rule
from trainers.strategies.servers.server import Dealer, Stream
from trainers.strategies.servers.service import ServedTrainer, ended
from trainers.strategies.servers.worker import Rows
from trainers.strategies.spare_replicas import collect


class StepsTogether(ServedTrainer):
    """The part of a trainer that waits for all workers in every step. Attributes are set by whose part it is."""

    _epoch: Parts
    _first = 0  # the steps before this epoch
    _applied = False  # the step after `steps` has been taken here
    _collected: list[np.ndarray]  # this server's slices of the gradients of a step, until it is updated

    def _compute(self, batch: Batch | None) -> None:
        measured = self.measured[: len(self.replica.metrics)]
        measured[:] = 0
        if batch is None:
            self._gradients[:] = 0  # or a callback would look at those of a step before
        elif self.part is not None:
            measured[:] = self.replica.gradients(batch.x, batch.y, batch.share)
            measured *= batch.share

    def _step(self, flags: tuple[float, ...]) -> Any:
        measured = self.measured
        measured[len(self.replica.metrics) :] = flags
        self._communication.start()
        combine(self._comm, measured, "a step of fit")
        self._communication.stop()
        if measured[-1]:  # a rank has failed
            return measured
        self._push_and_take() if self._desk is None else self._serve_step()
        return measured

    def _push_and_take(self) -> None:
        client = self._client
        assert client is not None
        for server in range(len(self.servers)):
            client.expect(server)
        client.push([Head(GRADIENTS, self.steps)] * len(self.servers), self._gradients)
        client.answered()
        client.take(self._parameters)
        self.replica.refresh()
        self._applied = True

    def _serve_step(self) -> None:
        desk, shard = self._desk, self._shard
        assert desk is not None
        assert shard is not None
        desk.open([PUSH])
        found = collect(desk, self.steps, len(self.workers), desk.clear)
        self._collected = [arrival.parcel.body for arrival in found.used]
        if self._survival is not None and len(self.servers) > 1:
            self._meet_servers()
        self._update_collected()
        reply = desk.parcel()
        reply.head = Head(WORK, self.steps + 1, shard.version)
        reply.body[:] = shard.parameters
        for arrival in found.used:
            desk.clear(arrival)
            desk.reply(reply, arrival.worker, whole=True)

    def note_step(self) -> None:
        super().note_step()
        self._applied, self._collected = False, []

    def _meet_servers(self) -> None:
        """Wait until all servers have the gradients of this step."""
        others = [rank for rank in self.servers if rank != self.rank]
        nothing = np.empty(0, np.uint8)
        requests = [self._messages.Irecv(nothing, rank, MEET) for rank in others]
        requests += [self._messages.Isend(nothing, rank, MEET) for rank in others]
        self._waits.all_of(requests, "have all servers get the gradients of a step")

    def _update_collected(self) -> None:
        assert self._shard is not None
        self._shard.add_up(self._collected)
        with self.span("update"):
            self._shard.update()
        self._epoch.note(self.steps - self._first, 0)
        self._applied = True

    # When a worker was lost

    def _finish_step(self) -> None:
        """Servers wait for each other before they update: when one has done so, all have the gradients of that step."""
        taken = self.steps + self._applied
        newest = max(all_values(self._comm, taken, HOW_FAR))
        if taken < newest and self._collected:
            self._update_collected()
        self.steps, self._applied, self._collected = newest, False, []


class AsynchronousEpochs(ServedTrainer):
    """The part of a trainer that serves, or works, for an epoch. Attributes are set by whose part it is."""

    _epoch: Parts
    _rule: Rule
    _warm_up: int
    _fetch_ahead: bool

    def _serve(self, fit: Fit, number: int) -> None:
        assert self._desk is not None
        assert self._shard is not None
        dealer = None
        everyone = range(len(self.workers))
        if self.rank == self.servers[0]:
            active = everyone[:1] if number < self._warm_up else everyone
            dealer = Dealer(np.flatnonzero(~self._epoch.dealt).tolist(), active, self._rule.bound, self._fetch_ahead)
        apply, halts = partial(self._apply, fit), partial(self._halts, fit)
        Stream(self._desk, self._shard, self._rule, dealer, apply, halts, self._epoch).serve(everyone)

    def _apply(self, fit: Fit, parcel: Parcel, factor: float) -> None:
        """Update this server's slice by what a worker has sent."""
        shard, step = self._shard, parcel.head.step // self.parts
        assert shard is not None

        def update() -> None:
            fit.begin_batch(step)
            with self.span("update"):
                shard.apply(parcel.body, factor)
            self.measured[: len(self.replica.metrics)] = parcel.measures
            fit.end_batch(step)

        fit.guarded(update)

    def _halts(self, fit: Fit) -> bool:
        """Whether this rank wants the epoch to end."""
        return fit.error is not None or self.stop_training

    def _work(self, fit: Fit, number: int) -> None:
        client, lane = self._client, self._lane
        assert client is not None
        assert lane is not None
        rows = Rows(fit.batches, number, self.parts, fit.fetches_ahead)
        client.begin()

        def fetch() -> None:
            client.fetch(self._halts(fit))
            if (coming := client.replies[0].head).kind == WORK:
                rows.prepare(coming.step)

        fetch()
        while (head := client.replies[0].head).kind == WORK:
            versions = client.take(self._parameters)
            self.replica.refresh()
            coming = lane.submit(fetch)
            with ended(coming):
                computed = fit.guarded(partial(self._compute_part, fit, rows, head.step))
                kind, gradients = (GRADIENTS, self._gradients) if computed else (NOTHING, None)
                halts = self._halts(fit)
                heads = [Head(kind, head.step, version, halts) for version in versions]
                client.push(heads, gradients, self.measured[: len(self.replica.metrics)])
                if computed:
                    fit.guarded(partial(fit.end_batch, head.step // self.parts))
            self._communication.start()
            coming.wait()
            self._communication.stop()
        client.bye()

    def _compute_part(self, fit: Fit, rows: Rows, number: int) -> bool:
        """Gradients and metrics of a part that was dealt; false when it has no rows. May raise anything."""
        step = number // self.parts
        with self.span("data"):
            batch = rows.take(number)
        if not len(batch.x):
            return False
        fit.begin_batch(step)
        measured = self.measured[: len(self.replica.metrics)]
        with self.span("compute"):
            measured[:] = self.replica.gradients(*fit.checked(batch)[:2], 1.0)
        if fit.unusable(self._gradients, self.replica):
            return False
        self._tally.add(measured, len(batch.x), step)
        return True
