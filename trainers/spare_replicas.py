"""SpareReplicasTrainer: a synchronous step takes the first gradients and does not wait for the slowest ranks."""

from functools import partial
from typing import Any

import numpy as np

from allreduce.topology import Topology
from allreduce.transport.control import all_values, everywhere
from trainers.data import Batch
from trainers.errors import ArgumentError
from trainers.fit.loop import Fit
from trainers.recovery.calls import outlives_losses
from trainers.replica import Replica
from trainers.strategies.interface import FLAGS
from trainers.strategies.servers.messages import GRADIENTS, NOTHING, WORK, Head
from trainers.strategies.servers.progress import HOW_FAR, Counts
from trainers.strategies.servers.service import ServedTrainer, agree_on_arguments, ended
from trainers.strategies.spare_replicas import Lead

CHIEF = 0


class SpareReplicasTrainer(ServedTrainer):
    """Synchronous training with spare replicas (J. Chen et al.: Revisiting distributed synchronous SGD, 2016).

    All n + b ranks compute their part of every batch. A step is the mean over the rows of the first n gradients that
    come; later ones are dropped, by their step's number, and counted, and a rank that is late goes on with the newest
    step. With b = 0 this is the training of MirroredTrainer, to float tolerance, and the same bits in every run. With
    spare replicas it is not: which rows a step uses depends on who is fast, and those of the dropped gradients have
    no effect in that epoch.

    Rank 0, the chief, collects and updates in the thread of the topology's worker, while it computes with a copy of
    the model. So any rank may be slow, or sleep, also the chief, without slowing the steps. An epoch ends when the late
    ranks have come in.

    Rows are fetched when they are needed, since only then it is known which step is the newest: `prefetch` has no use.

    Callbacks are called for the steps to which their rank has come; the metrics of a step are of the rows used. On the
    chief, what they read of the model's parameters may be newer than the step, and a learning rate that they set there
    counts from the next update on.
    The history has `dropped`, the number of gradients in an epoch that were not used.
    """

    steps_together = False

    @outlives_losses
    def __init__(
        self, replica: Replica, topology: Topology | None = None, *, spare: int = 1, on_failure: str | None = None
    ) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, with `bind_parameters`, on the CPU; the chief's can be copied.
        topology: of the ranks that train together; all ranks by default.
        spare: for how many ranks a step does not wait, fewer than there are.
        on_failure: as of MirroredTrainer: with "continue" a rank that is lost is simply missing, and is one of those
            for which no step waits. The chief's loss ends the training: nobody else has the optimizer's state.

        Raises ArgumentError, DisagreementError, or UnavailableError (an MPI without threads) on all ranks, and leaves
        nothing behind.
        """
        ranks = topology or Topology()
        error = None
        if isinstance(spare, bool) or not isinstance(spare, int | np.integer) or not 0 <= spare < ranks.size:
            error = ArgumentError(
                f"spare must be an integer from 0 to {ranks.size - 1}, one less than there are ranks, got {spare!r}"
            )
        if error is None and ranks.rank == CHIEF:
            error = _no_twin(replica)
        try:
            row = f"SpareReplicasTrainer({type(replica).__name__}, {spare=}, {on_failure=})"
            agree_on_arguments(ranks, replica, row, error, on_failure)
        except Exception as refused:
            if topology is None and everywhere(refused, ranks.world):
                ranks.close()
            raise
        self.spare, self._wanted = int(spare), ranks.size - int(spare)
        metrics = len(replica.metrics)
        super().__init__(
            replica, ranks, [CHIEF], range(ranks.size), metrics + 1, thread="serve", owns_topology=topology is None,
            on_failure=on_failure,
        )  # fmt: skip
        self.measured = np.zeros(metrics + len(FLAGS))
        self._values = np.zeros(metrics + 1)  # this rank's metrics and its share of the batch
        self._counts = Counts()
        self._begun, self._taken = -1, 0  # the epoch under way, and how many of its steps were taken
        if self.rank == CHIEF:  # where it computes; what the model is bound to is updated meanwhile
            self._own_parameters, self._own_gradients = map(np.zeros_like, (self._parameters, self._gradients))

    def _compute(self, batch: Batch | None) -> None:
        raise NotImplementedError("the steps of spare replicas are run by _run_epoch")

    def _step(self, flags: tuple[float, ...]) -> Any:
        raise NotImplementedError("the steps of spare replicas are run by _run_epoch")

    def _take_part(self) -> None:
        self.spare = max(0, self.size - self._wanted)  # a rank that was lost is one of those that no step waits for

    def _agree_on_progress(self) -> None:
        self._begun, self._taken = all_values(self._comm, [self._begun, self._taken], HOW_FAR)[CHIEF]
        if self.rank == CHIEF:
            self._own_parameters[:] = self._parameters

    def _begin_fit(self) -> None:
        self._begun = -1

    def _run_epoch(self, fit: Fit, number: int) -> None:
        if self._begun != number:
            self._begun, self._taken, self._counts = number, 0, Counts()
        if self._taken == fit.batches.steps:
            return
        if self.rank == CHIEF:
            self._lead(fit, number)
        else:
            self._follow(fit, number, self.replica, self._parameters, self._gradients)

    def _lead(self, fit: Fit, number: int) -> None:
        """The chief's epoch: it computes as the others do, with a copy of the model, and leads beside it."""
        desk, shard, lane = self._desk, self._shard, self._lane
        assert desk is not None
        assert shard is not None
        assert lane is not None
        twin = fit.guarded(self._twin)
        lead = Lead(desk, shard, self.size, self.spare, self._tally, self.span, self._counts)
        leading = lane.submit(partial(lead.run, fit.batches.sizes().tolist(), self._taken))
        try:
            with ended(leading):
                self._follow(fit, number, twin or self.replica, self._own_parameters, self._own_gradients)
            self._communication.start()
            leading.wait()
            self._communication.stop()
        finally:
            self._taken = lead.done
        fit.error = fit.error or lead.error
        if twin is not None:
            fit.guarded(lambda: self.replica.load_local_state(twin.local_state()))

    def _twin(self) -> Replica:
        """A copy of the chief's replica on memory of its own."""
        twin = self.replica.twin()
        twin.bind_parameters(self._own_parameters)
        twin.bind(self._own_gradients)
        return twin

    def _end_epoch(self) -> dict[str, Any]:
        self._tally.collect(self._comm, self._shard is None or self._shard.is_finite())
        return self._told(self._counts)

    def _follow(self, fit: Fit, number: int, replica: Replica, parameters: np.ndarray, gradients: np.ndarray) -> None:
        """A rank's epoch: it computes what the chief says is the newest step.

        replica: computes, bound to these flat `parameters` and `gradients`.
        """
        client, visited = self._client, fit.batches.order(number)
        assert client is not None
        step, kind = self._taken, WORK
        while kind == WORK:
            computed = fit.guarded(partial(self._compute_part, fit, visited, step, replica, gradients))
            halts = fit.error is not None or self.stop_training
            head = Head(GRADIENTS if computed else NOTHING, step, halt=halts)
            client.expect(CHIEF)
            client.push([head], gradients if computed else None, self._values)
            client.answered()
            client.take(parameters)
            replica.refresh()
            reply = client.replies[CHIEF]
            self.measured[: self._values.size - 1] = reply.measures[:-1]
            fit.guarded(partial(fit.end_batch, step))
            kind, step = reply.head.kind, reply.head.step

    def _compute_part(self, fit: Fit, visited: np.ndarray, step: int, replica: Replica, gradients: np.ndarray) -> bool:
        """This rank's gradients of a step; false when it has no rows. May raise anything."""
        self._values[:] = 0
        fit.begin_batch(step)
        with self.span("data"):
            batch = fit.batches.share(visited, step, self.rank)
        if not len(batch.x):
            return False
        with self.span("compute"):
            self._values[:-1] = replica.gradients(*fit.checked(batch)[:2], batch.share)
        if fit.unusable(gradients, replica):
            self._values[:] = gradients[:] = 0  # of no rows: the chief waits for as many ranks as bring some
            return True
        self._values[:-1] *= batch.share
        self._values[-1] = batch.share
        return True


def _no_twin(replica: Replica) -> ArgumentError | None:
    """Why a replica can't be copied."""
    if not isinstance(replica, Replica):
        return None  # refused as that
    try:
        replica.twin()
    except ArgumentError as error:
        return ArgumentError(f"the chief of spare replicas computes with a copy of the model, and {error}")
    return None
