"""Epochs in which workers wait for nobody, and servers apply each gradient as it comes."""

from functools import partial

import numpy as np

from trainers.fitting import Fit
from trainers.serving.dealer import Dealer
from trainers.serving.parcels import GRADIENTS, NOTHING, WORK, Head, Parcel
from trainers.serving.parts import Parts
from trainers.serving.rows import Rows
from trainers.serving.staleness import Rule
from trainers.serving.stream import Stream
from trainers.serving.trainer import ServedTrainer, ended


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
