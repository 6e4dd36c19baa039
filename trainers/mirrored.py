"""MirroredTrainer: average the gradients, then every replica applies them, so that replicas stay identical."""

from typing import Any

import allreduce
from allreduce.base import AllReduce
from allreduce.topology import Topology
from trainers.base import Trainer
from trainers.data import Batch
from trainers.errors import ArgumentError
from trainers.replica import Replica


class MirroredTrainer(Trainer):
    """Synchronous data-parallel training with one AllReduce a step. Creating is collective.

    All replicas become copies of rank 0's at once, and again when a fit begins.

    replica: this rank's copy of the model; its gradients are moved into memory that the backend allocates.
    allreduce: the name of a backend, or a backend. A backend that was passed in is not closed here.
    topology: of the ranks that train together; all ranks by default, or the given backend's.

    Also an attribute: `buffer`, the array that is reduced in every step: the gradients, and behind them one
    element for each of the replica's metrics, so that the loss costs no message of its own.

        with MirroredTrainer(NumpyNetwork([64, 32, 10]), allreduce="ring") as trainer:
            history = trainer.fit(x, y, epochs=10, batch_size=100)
    """

    def __init__(self, replica: Replica, allreduce: str | AllReduce = "auto", topology: Topology | None = None) -> None:
        self._owns_backend = not isinstance(allreduce, AllReduce)
        self.allreduce = _backend(allreduce, topology)
        super().__init__(replica, self.allreduce.topology)
        length = replica.gradient_length
        self.buffer = self.allreduce.allocate(
            length + len(replica.metrics), replica.gradient_dtype, device=replica.device
        )
        self._values = self.buffer[length:]
        replica.bind(self.buffer[:length])
        self._mirror()  # evaluate and predict share their work, so they need equal replicas before any fit

    def _step(self, batch: Batch) -> Any:
        values = self._values
        values[:] = self.replica.gradients(batch.x, batch.y, batch.share)
        values *= batch.share
        # Every rank's part is weighted by its share of the batch already, so the sum is the mean over samples.
        self._communication.start()
        self.allreduce(self.buffer, "sum")
        self._communication.stop()
        self.replica.update()
        return values

    def _close(self) -> None:
        if self._owns_backend:
            self.allreduce.close()


def _backend(given: str | AllReduce, topology: Topology | None) -> AllReduce:
    if not isinstance(given, AllReduce):
        return allreduce.create(given, topology)
    if topology is not None and topology is not given.topology:
        raise ArgumentError(f"{given!r} has a topology of its own; pass the backend's name, or no topology")
    return given
