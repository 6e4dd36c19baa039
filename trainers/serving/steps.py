"""Steps of workers and servers that all of them take together."""

from typing import Any

import numpy as np

from allreduce.messages.agreement import all_values, combine
from trainers.data import Batch
from trainers.serving.parcels import GRADIENTS, MEET, PUSH, WORK, Head
from trainers.serving.parts import HOW_FAR, Parts
from trainers.serving.rounds import collect
from trainers.serving.trainer import ServedTrainer


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
