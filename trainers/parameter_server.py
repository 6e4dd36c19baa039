"""ParameterServerTrainer: servers hold the parameters and update them, workers compute."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce.messages.agreement import all_values, combine, everywhere
from allreduce.topology import Topology
from trainers.base import Trainer
from trainers.data import Batch, Batches
from trainers.errors import ArgumentError
from trainers.fitting import Fit
from trainers.making import outlives_losses
from trainers.replica import Replica
from trainers.serving.choices import bad_options, server_ranks
from trainers.serving.dealer import Dealer
from trainers.serving.parcels import GRADIENTS, MEET, NOTHING, PUSH, WORK, Head, Parcel
from trainers.serving.parts import HOW_FAR, Parts
from trainers.serving.rounds import collect
from trainers.serving.rows import Rows
from trainers.serving.staleness import Rule
from trainers.serving.stream import Stream
from trainers.serving.trainer import ServedTrainer, agree_on_arguments, ended
from trainers.stepping import FLAGS


class ParameterServerTrainer(ServedTrainer):
    """Parameters sharded over servers, gradients from workers; servers and workers are ranks of their own.

    The flat parameters are cut into one slice of equal bytes a server, so large arrays are split. Each server holds
    the optimizer's state of its slice.

    updates="sync": a step waits for all workers, and the workers divide the batch: the training of MirroredTrainer,
    to float tolerance, and the same bits in every run.

    updates="async": a server applies each gradient as it comes (J. Dean et al.: Large scale distributed deep networks,
    2012). The batches are those of MirroredTrainer, each divided into one part a worker; the parts are dealt one by
    one, and each is an update of its own by the mean over its rows, so an epoch has batches * workers updates, and a
    fast worker does more of them. A worker gets its next part, and the parameters for it, while it computes. Every
    row is visited once an epoch (gradients that were dropped included), but the order of updates, and so the result,
    differs from run to run. Between epochs all ranks have the same parameters. Callbacks are told of the parts that
    their rank computes, those of a server of the gradients that it applies, by the number of the batch and with the
    loss of that part. The first server keeps the bound on staleness exactly, others within the number of gradients
    under way.

    The history has `staleness`, how many gradients were 0, 1, 2, ... updates behind at the first server, and `dropped`.
    Callbacks that change the optimizer (its learning rate) must be given to the servers too. Buffers that nobody
    averages (batch norm's are) are saved as rank 0 has them, so rank 0 should be a worker where there are any.
    """

    @outlives_losses
    def __init__(
        self,
        replica: Replica,
        topology: Topology | None = None,
        *,
        servers: int | Sequence[int] = 1,
        updates: str = "async",
        stale: str = "keep",
        max_staleness: int | None = None,
        warm_up: int = 0,
        learning_rate: str = "keep",
        fetch_ahead: bool = True,
        on_failure: str | None = None,
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, with `bind_parameters`, on the CPU; servers need one too.
        topology: of the ranks that train together; all ranks by default.
        servers: how many ranks, the last ones, are servers, or which ranks. All others are workers.
        stale: what becomes of a gradient whose parameters others have updated meanwhile: "keep" applies it, "scale"
            divides the learning rate by 1 + the number of those updates, "drop" discards it beyond `max_staleness`.
        max_staleness: with "keep" and "scale" a bound on that number, for which fast workers wait.
        warm_up: the first epochs are computed by the first worker alone.
        learning_rate: "keep", or "divide": every update uses the learning rate divided by the number of workers, so
            that the updates of one batch go as far as one update by its mean would.
        fetch_ahead: false: a worker gets parameters only after its last gradients were applied. It waits more, and
            its gradients are less stale.
        on_failure: as of MirroredTrainer: with "continue" a worker that is lost is simply missing, and its rows go to
            the others at once. The loss of a server ends the training, since nobody else has its slice.

        Raises ArgumentError or DisagreementError on all ranks, and leaves nothing behind.
        """
        ranks = topology or Topology()
        chosen, error = server_ranks(servers, ranks.size)
        error = error or bad_options(updates, stale, max_staleness, warm_up, learning_rate)
        if error is None and (stale == "scale" or learning_rate == "divide") and not replica.learning_rates:
            error = ArgumentError(
                f"{type(replica).__name__} has no learning rate that can be set, so leave out "
                'stale="scale" and learning_rate="divide"'
            )
        row = (
            f"ParameterServerTrainer({type(replica).__name__}, {servers=}, {updates=}, {stale=}, {max_staleness=}, "
            f"{warm_up=}, {learning_rate=}, {fetch_ahead=}, {on_failure=})"
        )
        try:
            agree_on_arguments(ranks, replica, row, error, on_failure)
        except Exception as refused:
            if topology is None and everywhere(refused, ranks.world):
                ranks.close()
            raise
        workers = tuple(rank for rank in range(ranks.size) if rank not in chosen)
        self.updates, self._sync = updates, updates == "sync"
        self.steps_together = self._sync
        self._warm_up, self._fetch_ahead, self._first_workers = warm_up, bool(fetch_ahead), len(workers)
        self._rule = Rule(stale, max_staleness, 1 / len(workers) if learning_rate == "divide" else 1.0)
        thread, owns, metrics = "" if self._sync else "ask", topology is None, len(replica.metrics)
        super().__init__(replica, ranks, chosen, workers, metrics, thread, owns, on_failure)
        self.measured = np.zeros(metrics + len(FLAGS))
        self._epoch = Parts()
        self._applied = False  # the step after `steps` has been taken here
        self._collected: list[np.ndarray] = []  # this server's slices of the gradients of a step, until it is updated

    # When a rank was lost

    def _take_part(self) -> None:
        self.part = self.workers.index(self.rank) if self.rank in self.workers else None
        self.parts = len(self.workers) if self._sync else self._first_workers  # parts are dealt, to whoever is there

    def _agree_on_progress(self) -> None:
        return self._finish_step() if self._sync else self._epoch.agree(self._comm, self._shard is not None)

    def _finish_step(self) -> None:
        """Servers wait for each other before they update: when one has done so, all have the gradients of that step."""
        taken = self.steps + self._applied
        newest = max(all_values(self._comm, taken, HOW_FAR))
        if taken < newest and self._collected:
            self._update_collected()
        self.steps, self._applied, self._collected = newest, False, []

    # Steps that all ranks take together

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
        self._epoch.counts.apply(0)

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
        self._applied = True

    # Asynchronous epochs

    def _meter(self, batches: Batches) -> Any:
        return Trainer._meter(self, batches) if self._sync else super()._meter(batches)

    def _begin_fit(self) -> None:
        self._epoch = Parts()

    def _run_epoch(self, fit: Fit, number: int) -> None:
        self._epoch.begin(number, 0 if self._shard is None else fit.batches.steps * self.parts)
        run = fit.together if self._sync else partial(self._work if self._desk is None else self._serve, fit)
        try:
            run(number)
        except Exception as error:
            if everywhere(error, self._comm):  # so all ranks come to this
                self._spread()
            raise
        self._spread()

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

    def _end_epoch(self) -> dict[str, Any]:
        if not self._sync:
            self._tally.collect(self._comm, self._shard is None or self._shard.is_finite())
        return self._told(self._epoch.counts)
