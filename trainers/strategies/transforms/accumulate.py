"""Accumulate: a rank's rows of a batch are computed in micro-batches."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from allreduce.arrays import gpu
from allreduce.arrays.chunks import chunk
from trainers.arguments import Flag, integer
from trainers.data import row_count, sliced
from trainers.options.average import Average, Exact
from trainers.replica import Replica, undo_batch
from trainers.strategies.transforms.transform import Applied, Compute, Rows, Transform


@dataclass(frozen=True)
class Accumulate(Transform):
    """Computes each rank's share of a batch in micro-batches, one after the other, and adds up their gradients.

    micro_batches: their number. Memory for activations is that of one micro-batch; the training is the same.

    `batch_size` remains the GLOBAL batch of an update: Lightning's accumulate_grad_batches=k makes the batch k times as
    large instead.
    """

    divides: ClassVar[bool] = True

    micro_batches: Annotated[
        int,
        integer(1),
        Flag(
            "accumulate",
            "N",
            "each rank computes its share of a batch in N micro-batches one after the other, for less memory; a batch "
            "stays --batch-size samples",
            default="1",
        ),
    ]

    def start(self, replica: Replica) -> Applied:
        replica.undoable |= self.micro_batches > 1
        return MicroBatches(self.micro_batches)

    def error(self, replica: Replica, average: Average | None) -> str:
        if not isinstance(average, Exact) or self.micro_batches == 1:
            return ""
        return (
            f"Accumulate({self.micro_batches}) with Exact, which computes batches in micro-batches already: "
            "give Exact another micro_batch, and leave out Accumulate"
        )


class MicroBatches(Applied):
    """Computes rows in micro-batches, each from the statistics of the step's start, as ranks compute theirs. Running
    statistics become the mean of those of the micro-batches. most: the number of micro-batches, if there are as many
    rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sum: Any = None  # of the gradients of the micro-batches so far

    def compute(self, inner: Compute, rows: Rows) -> Any:
        memory, replica, every = rows.memory, rows.replica, row_count(rows.data[0])
        count = min(self._most, every)
        if count < 2:
            return inner(rows)
        means: Any = 0.0
        for number in range(count):
            span = chunk(every, count, number)
            part = (span.stop - span.start) / every
            if number:
                undo_batch(replica)
                self._sum = memory.copy() if self._sum is None else self._sum
                self._sum[:] = memory  # which the replica overwrites
            values = inner(Rows(sliced(rows.data, span), rows.share * part, memory, replica))
            if number:
                memory += self._sum
            means = means + part * (values if gpu.is_gpu_array(values) else np.asarray(values, np.float64))
        return means
