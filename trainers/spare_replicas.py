"""SpareReplicasTrainer: a synchronous step takes the first gradients and does not wait for the slowest ranks."""

from functools import partial
from typing import Any

import numpy as np

from allreduce.messages.agreement import everywhere
from allreduce.topology import Topology
from trainers.data import Batch
from trainers.errors import ArgumentError
from trainers.fitting import FLAGS, Fit
from trainers.replica import Replica
from trainers.serving.desk import Arrival
from trainers.serving.parcels import END, GRADIENTS, NOTHING, PUSH, WORK, Head, Parcel
from trainers.serving.rounds import Round, collect
from trainers.serving.staleness import Counts
from trainers.serving.trainer import ServedTrainer, agree_on_arguments

CHIEF = 0
ROUNDING = 1e-9  # of the sum of all shares


class SpareReplicasTrainer(ServedTrainer):
    """Synchronous training with spare replicas (J. Chen et al.: Revisiting distributed synchronous SGD, 2016).

    All n + b ranks compute their part of every batch. A step is the mean over the rows of the first n gradients that
    come; later ones are dropped, by their step's number, and counted, and a rank that is late goes on with the newest
    step. With b = 0 this is the training of MirroredTrainer, to float tolerance, and the same bits in every run. With
    spare replicas it is not: which rows a step uses depends on who is fast, and those of the dropped gradients have
    no effect in that epoch.

    Rank 0, the chief, collects and updates between its own gradients. So any other rank may be slow, or sleep, without
    slowing the steps, and the chief may not. An epoch ends when the late ranks have come in.

    Callbacks are called for the steps to which their rank has come; the metrics of a step are of the rows used.
    The history has `dropped`, the number of gradients in an epoch that were not used.
    """

    steps_together = False

    def __init__(self, replica: Replica, topology: Topology | None = None, *, spare: int = 1) -> None:
        """Make the replicas equal, and move their parameters and gradients into memory of the trainer. Collective.

        replica: this rank's copy of the model, with `bind_parameters`, on the CPU.
        topology: of the ranks that train together; all ranks by default.
        spare: for how many ranks a step does not wait, fewer than there are.

        Raises ArgumentError or DisagreementError on all ranks, and leaves nothing behind.
        """
        ranks = topology or Topology()
        error = None
        if isinstance(spare, bool) or not isinstance(spare, int | np.integer) or not 0 <= spare < ranks.size:
            error = ArgumentError(
                f"spare={spare!r}, and there are {ranks.size} ranks: give an integer of at least 0 and below that, so "
                "that a step takes the gradients of at least one"
            )
        try:
            agree_on_arguments(ranks, replica, f"SpareReplicasTrainer({type(replica).__name__}, {spare=})", error)
        except Exception as refused:
            if topology is None and everywhere(refused, ranks.world):
                ranks.close()
            raise
        self.spare = int(spare)
        metrics = len(replica.metrics)
        super().__init__(
            replica, ranks, [CHIEF], range(1, ranks.size), metrics + 1, ahead=False, owns_topology=topology is None
        )
        self.measured = np.zeros(metrics + len(FLAGS))
        self._values = np.zeros(metrics + 1)  # this rank's metrics and its share of the batch
        self._counts = Counts()
        self._newest: Parcel | None = None  # what is sent to everyone until the next update

    def _compute(self, batch: Batch | None) -> None:
        raise NotImplementedError("the steps of spare replicas are run by _run_epoch")

    def _step(self, flags: tuple[float, ...]) -> Any:
        raise NotImplementedError("the steps of spare replicas are run by _run_epoch")

    def _run_epoch(self, fit: Fit, number: int) -> None:
        self._counts = Counts()
        visited = fit.batches.order(number)
        if self.rank == CHIEF:
            self._lead(fit, visited)
        else:
            self._follow(fit, visited)

    def _end_epoch(self) -> dict[str, Any]:
        self._tally.collect(self._comm, self._shard is None or self._shard.is_finite())
        return self._told(self._counts)

    def _compute_part(self, fit: Fit, visited: np.ndarray, step: int) -> bool:
        """This rank's gradients of a step; false when it has no rows. May raise anything."""
        self._values[:] = 0
        fit.begin_batch(step)
        with self.span("data"):
            batch = fit.batches.share(visited, step, self.rank)
        if not len(batch.x):
            return False
        with self.span("compute"):
            self._values[:-1] = self.replica.gradients(*fit.checked(batch)[:2], batch.share)
        self._values[:-1] *= batch.share
        self._values[-1] = batch.share
        return True

    def _take_measured(self, means: np.ndarray) -> None:
        self.measured[: means.size] = means

    # All ranks but the chief

    def _follow(self, fit: Fit, visited: np.ndarray) -> None:
        client = self._client
        assert client is not None
        step, kind = 0, WORK
        while kind == WORK:
            computed = fit.guarded(partial(self._compute_part, fit, visited, step))
            halts = fit.error is not None or self.stop_training
            head = Head(GRADIENTS if computed else NOTHING, step, halt=halts)
            client.expect(CHIEF)
            client.push([head], self._gradients if computed else None, self._values)
            client.answered()
            client.take(self._parameters)
            self.replica.refresh()
            reply = client.replies[CHIEF]
            self._take_measured(reply.measures[:-1])
            fit.guarded(partial(fit.end_batch, step))
            kind, step = reply.head.kind, reply.head.step

    # The chief

    def _lead(self, fit: Fit, visited: np.ndarray) -> None:
        assert self._desk is not None
        self._desk.open([PUSH])
        self._newest = None
        self._send_home(self._take_steps(fit, visited))

    def _take_steps(self, fit: Fit, visited: np.ndarray) -> list[Arrival]:
        """All steps, or those until somebody ends the epoch; returns who waits for an answer then."""
        desk, sizes = self._desk, fit.batches.sizes()
        assert desk is not None
        for step, rows in enumerate(sizes):
            computed = fit.guarded(partial(self._compute_part, fit, visited, step))
            if fit.error is not None:
                return []
            wanted = max(1, min(rows, self.size) - self.spare)
            found = collect(desk, step, wanted, partial(self._go_on, step), own=bool(computed))
            if not found.failed:
                fit.guarded(partial(self._update, found, step, int(rows)))
                self._counts.dropped += found.dropped + (bool(computed) and not found.own)
                fit.guarded(partial(fit.end_batch, step))
            halts = found.failed or found.stop or self.stop_training or fit.error is not None
            if halts or step == len(sizes) - 1:
                return found.everybody
            for arrival in found.everybody:
                self._answer(arrival, WORK, step + 1)
        return []

    def _update(self, found: Round, step: int, rows: int) -> None:
        """One step by what was used of it."""
        shard = self._shard
        assert shard is not None
        summands = [shard.gradients] if found.own else []
        measured = self._values * found.own
        for arrival in found.used:
            summands.append(arrival.parcel.body)
            measured += arrival.parcel.measures
        share = float(measured[-1])
        shard.add_up(summands, 1.0 if abs(share - 1) < ROUNDING else share)
        with self.span("update"):
            shard.update()
        self._newest = None
        means = measured[:-1] / share
        self._take_measured(means)
        self._tally.add(means, share * rows, step)

    def _go_on(self, step: int, arrival: Arrival) -> None:
        """A rank is late: have it go on with `step`, the newest."""
        self._counts.dropped += arrival.parcel.head.kind == GRADIENTS
        self._answer(arrival, WORK, step)

    def _send_home(self, waiting: list[Arrival]) -> None:
        """The epoch is over: tell it to every rank that comes, until all have come."""
        desk = self._desk
        assert desk is not None
        self._newest = None
        for arrival in waiting:
            self._answer(arrival, END, 0)
        for _ in range(len(self.workers) - len(waiting)):
            arrival = desk.next("have the late ranks come in at the end of an epoch")
            self._counts.dropped += arrival.parcel.head.kind == GRADIENTS
            self._answer(arrival, END, 0)
        desk.drain()

    def _answer(self, arrival: Arrival, kind: int, step: int) -> None:
        """Send a rank the newest parameters, and the metrics of the last step."""
        desk, shard = self._desk, self._shard
        assert desk is not None
        assert shard is not None
        if self._newest is None:
            self._newest = desk.parcel()
            self._newest.head = Head(kind, step, shard.version)
            self._newest.measures[:-1] = self.measured[: self._values.size - 1]
            self._newest.body[:] = shard.parameters
        if kind == WORK:
            desk.clear(arrival)
        desk.reply(self._newest, arrival.worker, whole=True)
