"""ParameterServerTrainer: servers hold the parameters and update them, workers compute."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.control import everywhere
from trainers.data import Batches
from trainers.errors import ArgumentError
from trainers.fit.loop import Fit
from trainers.recovery.calls import outlives_losses
from trainers.replica import Replica
from trainers.strategies.interface import FLAGS
from trainers.strategies.servers.progress import Parts, Rule, bad_options, server_ranks
from trainers.strategies.servers.service import agree_on_arguments
from trainers.strategies.servers.strategy import AsynchronousEpochs, StepsTogether
from trainers.trainer import Trainer


class ParameterServerTrainer(StepsTogether, AsynchronousEpochs):
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
            the others at once. The loss of a server ends the training, which goes on from its last checkpoint.

        Raises ArgumentError or DisagreementError on all ranks, and leaves nothing behind.
        """
        ranks = topology or Topology()
        chosen, error = server_ranks(servers, ranks.size)
        error = error or bad_options(updates, stale, max_staleness, warm_up, learning_rate)
        if (
            error is None
            and (stale == "scale" or learning_rate == "divide")
            and not getattr(replica, "learning_rates", True)
        ):
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
        self._collected = []
        self._epoch = Parts()

    # When a rank was lost

    def _take_part(self) -> None:
        self.part = self.workers.index(self.rank) if self.rank in self.workers else None
        self.parts = len(self.workers) if self._sync else self._first_workers  # parts are dealt, to whoever is there

    def _agree_on_progress(self) -> None:
        if self._sync:
            self._finish_step()
        else:
            self._epoch.agree(self._comm, self._shard is not None)

    # Epochs

    def _meter(self, batches: Batches) -> Any:
        return Trainer._meter(self, batches) if self._sync else super()._meter(batches)

    def _begin_fit(self) -> None:
        self._epoch = Parts()

    def _run_epoch(self, fit: Fit, number: int) -> None:
        parts = fit.batches.steps * (1 if self._sync else self.parts)
        self._epoch.begin(number, 0 if self._shard is None else parts)
        self._first = self.steps - fit.place.step
        run = fit.together if self._sync else partial(self._work if self._desk is None else self._serve, fit)
        try:
            run(number)
        except Exception as error:
            if everywhere(error, self._comm):  # so all ranks come to this
                self._spread()
            raise
        self._spread()

    def _end_epoch(self) -> dict[str, Any]:
        if not self._sync:
            self._tally.collect(self._comm, self._shard is None or self._shard.is_finite())
        return self._told(self._epoch.counts())
