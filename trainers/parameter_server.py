"""ParameterServerTrainer: servers hold the parameters and update them, workers compute."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce.messages.agreement import combine, everywhere
from allreduce.topology import Topology
from trainers.base import Trainer
from trainers.data import Batch, Batches
from trainers.errors import ArgumentError
from trainers.fitting import Fit
from trainers.replica import Replica
from trainers.serving.dealer import Dealer
from trainers.serving.parcels import GRADIENTS, NOTHING, PUSH, WORK, Head, Parcel
from trainers.serving.rounds import collect
from trainers.serving.rows import Rows
from trainers.serving.staleness import STALE, Counts, Rule
from trainers.serving.stream import Stream
from trainers.serving.trainer import ServedTrainer, agree_on_arguments
from trainers.stepping import FLAGS

UPDATES = ("async", "sync")
RATES = ("keep", "divide")


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

        Raises ArgumentError or DisagreementError on all ranks, and leaves nothing behind.
        """
        ranks = topology or Topology()
        chosen, error = _server_ranks(servers, ranks.size)
        error = error or _bad_options(updates, stale, max_staleness, warm_up, learning_rate)
        if error is None and (stale == "scale" or learning_rate == "divide") and not replica.learning_rates:
            error = ArgumentError(
                f"{type(replica).__name__} has no learning rate that can be set, so leave out "
                'stale="scale" and learning_rate="divide"'
            )
        row = (
            f"ParameterServerTrainer({type(replica).__name__}, {servers=}, {updates=}, {stale=}, {max_staleness=}, "
            f"{warm_up=}, {learning_rate=}, {fetch_ahead=})"
        )
        try:
            agree_on_arguments(ranks, replica, row, error)
        except Exception as refused:
            if topology is None and everywhere(refused, ranks.world):
                ranks.close()
            raise
        workers = tuple(rank for rank in range(ranks.size) if rank not in chosen)
        self.updates, self._sync = updates, updates == "sync"
        self.steps_together = self._sync
        self._warm_up, self._fetch_ahead = warm_up, bool(fetch_ahead)
        self._rule = Rule(stale, max_staleness, 1 / len(workers) if learning_rate == "divide" else 1.0)
        thread = "" if self._sync else "ask"
        super().__init__(replica, ranks, chosen, workers, len(replica.metrics), thread, owns_topology=topology is None)
        self.part = workers.index(self.rank) if self.rank in workers else None
        self.parts = len(workers)
        self.measured = np.zeros(len(replica.metrics) + len(FLAGS))
        self._counts = Counts()
        self._step_number = 0

    # Steps that all ranks take together

    def _compute(self, batch: Batch | None) -> None:
        measured = self.measured[: len(self.replica.metrics)]
        measured[:] = 0
        if batch is not None and self.part is not None:
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
        if self._client is not None:
            self._push_and_take()
        else:
            self._serve_step()
        self._step_number += 1
        return measured

    def _push_and_take(self) -> None:
        client = self._client
        assert client is not None
        for server in range(len(self.servers)):
            client.expect(server)
        client.push([Head(GRADIENTS, self._step_number)] * len(self.servers), self._gradients)
        client.answered()
        client.take(self._parameters)
        self.replica.refresh()

    def _serve_step(self) -> None:
        desk, shard = self._desk, self._shard
        assert desk is not None
        assert shard is not None
        desk.open([PUSH])
        found = collect(desk, self._step_number, len(self.workers), desk.clear)
        shard.add_up([arrival.parcel.body for arrival in found.used])
        with self.span("update"):
            shard.update()
        reply = desk.parcel()
        reply.head = Head(WORK, self._step_number + 1, shard.version)
        reply.body[:] = shard.parameters
        for arrival in found.used:
            desk.clear(arrival)
            desk.reply(reply, arrival.worker, whole=True)
        self._counts.apply(0)

    # Asynchronous epochs

    def _meter(self, batches: Batches) -> Any:
        return Trainer._meter(self, batches) if self._sync else super()._meter(batches)

    def _run_epoch(self, fit: Fit, number: int) -> None:
        self._counts = Counts()
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
            dealer = Dealer(fit.batches.steps * self.parts, active, self._rule.bound, self._fetch_ahead)
        apply = partial(self._apply, fit)
        stream = Stream(self._desk, self._shard, self._rule, dealer, apply, partial(self._halts, fit))
        stream.serve(everyone)
        self._counts = stream.counts

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
        if fit.unusable(self._gradients):
            return False
        self._tally.add(measured, len(batch.x), step)
        return True

    def _end_epoch(self) -> dict[str, Any]:
        if not self._sync:
            self._tally.collect(self._comm, self._shard is None or self._shard.is_finite())
        return self._told(self._counts)


def _server_ranks(servers: Any, ranks: int) -> tuple[tuple[int, ...], ArgumentError | None]:
    """The ranks that are servers, or what is wrong with them."""
    if isinstance(servers, int | np.integer) and not isinstance(servers, bool):
        if servers < 1:
            return (), ArgumentError(f"servers={servers!r} makes no sense: give an integer of at least 1")
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
            f"servers={servers!r} leaves no worker (ranks: {ranks}): start more ranks, or fewer servers"
        )
    return chosen, None


def _bad_options(updates: Any, stale: Any, most: Any, warm_up: Any, rate: Any) -> ArgumentError | None:
    for name, value, known in (("updates", updates, UPDATES), ("stale", stale, STALE), ("learning_rate", rate, RATES)):
        if value not in known:
            return ArgumentError(f"{name}={value!r} is unknown; use one of {', '.join(known)}")
    for name, value in (("max_staleness", 0 if most is None else most), ("warm_up", warm_up)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            return ArgumentError(f"{name}={value!r} makes no sense: give an integer of at least 0")
    if stale == "drop" and most is None:
        return ArgumentError('stale="drop" needs max_staleness: how many updates behind is too many')
    given = [stale != "keep" and "stale", most is not None and "max_staleness", warm_up and "warm_up",
             rate != "keep" and "learning_rate"]  # fmt: skip
    useless = [name for name in given if name]
    if updates == "sync" and useless:
        return ArgumentError(f'{useless[0]} has no use with updates="sync", where no gradient is stale; leave it out')
    return None
