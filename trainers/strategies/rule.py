"""UpdateRule, which computes and applies gradients, with the transforms of a fit (strategies.transforms).

Every strategy computes gradients by `UpdateRule.gradients`; Exact, which has micro-batches of its own, each of them by
`UpdateRule.compute`. All update by `UpdateRule.transform`, then `UpdateRule.update`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import all_values, combine
from trainers.arrays import average
from trainers.arrays.squares import scale
from trainers.data import Batch, Data, row_count
from trainers.replica import ALL, Replica, Slices, gradients_of, spans_in, weight_of
from trainers.strategies.alike import MARKS
from trainers.strategies.transforms.transform import Applied, AppliedTransforms, Compute, Rows, Transform

NORM = "learn the norm of the gradients"
# FLAGS are appended to each step's metrics; after the reduction they are the numbers of ranks that set the flag
# (MARKS: of the fingerprint of the next batch, if all ranks read the same ones, see strategies.alike)
# ("rows": the rows of the next batch, if the batches are a stream)
# ("weight": the mean weight that the loss has counted in the rows)
FLAGS = ("left_out", *MARKS, "rows", "weight", "unused", "stop", "save", "failed")
WEIGHT, UNUSED = FLAGS.index("weight"), FLAGS.index("unused")
ONE = 1e-6  # a mean weight this close to 1 is 1: shares of a batch are rounded


class UpdateRule(AppliedTransforms):
    """Computes the gradients of a batch, and updates a replica by averaged gradients, with the transforms of the fit.
    Local, but for `hold_unused`.

    weight: the mean weight that the loss has counted in the rows of the last batch, times this rank's share of it.
    unused: the parameters for which the last batch gave no gradient; see Replica.unused.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self.weight: float
        self.unused: np.ndarray
        self.use(())
        self.take_none()

    def use(self, transforms: Sequence[Transform]) -> None:
        """Use these transforms from now on, in a new fit. Local, called on all ranks. Raises ArgumentError if two of
        their meters have one name, or one has that of a metric."""
        self.start([each.start(self._replica) for each in transforms], self._replica.metrics if transforms else ())
        self._early = all(type(each).compute is Applied.compute for each in self.applied)
        self._asks: bool | None = None  # whether ranks ask each other in each step, see `hold_unused`; None: not known
        compute: Compute = self._computed
        for each in reversed(self.applied):
            compute = partial(each.compute, compute)
        self.compute = compute

    def begin(self, trains: bool) -> None:
        """Begin a fit, or go on from a state that was loaded. trains: whether steps follow; an average of the
        parameters that no transform moves is then dropped. Local, called on all ranks."""
        for each in self.applied:
            each.begin()
        held = self._replica.average
        if trains and held is not None and held.decay is None:
            average.keep(self._replica, None)

    def plan(self, epochs: int, length: int | None) -> None:
        """As Applied.plan, for all transforms. Raises ArgumentError."""
        for each in self.applied:
            each.plan(epochs, length)

    # Gradients

    def gradients(
        self,
        batch: Batch,
        share: float,
        memory: Any,
        replica: Replica | None = None,
        ready: Callable[[int], None] | None = None,
    ) -> Any:
        """Write the gradients of a batch to `memory`, to which the replica is bound. Returns as Replica.gradients.

        replica: by default the strategy's. ready: see Replica.ready.
        """
        replica = replica or self._replica
        self.take_none()
        self.weight = share * mean_weight(replica, batch.data)
        return self.compute(Rows(batch.data, share, memory, replica, ready if self._early else None))

    def _computed(self, rows: Rows) -> Any:
        """Compute the gradients of rows, of which a batch may have several parts; see Compute."""
        values = gradients_of(rows.replica, rows.data, rows.share, rows.ready)
        self.unused = self.unused & rows.replica.unused
        return values

    def take_none(self) -> None:
        """Take note that this rank has no batch in this step, or none so far. Local."""
        self.weight, self.unused = 0.0, np.ones(getattr(self._replica, "optional", 0), bool)

    def weigh(self, measured: Any, gradients: Sequence[Any]) -> None:
        """Divide gradients and the loss by the mean weight of the rows, if the loss counts weights. Local.

        measured: metrics and FLAGS, summed over the ranks. gradients: their sums, or this rank's part of them.
        """
        replica = self._replica
        if not replica.counts:
            return
        weight = measured[len(replica.metrics) + WEIGHT]
        if gpu.is_gpu_array(weight):  # the host does not wait for it
            factor = gpu.cupy().where((weight > 0) & (abs(weight - 1) > ONE), 1 / weight, 1)
            for each in [*gradients, measured[:1]]:
                each *= factor.astype(each.dtype)
        elif weight > 0 and abs(weight - 1) > ONE:
            for each in [*gradients, measured[:1]]:
                scale(each, 1 / float(weight))

    def hold_unused(self, comm: MPI.Intracomm, measured: Any) -> None:
        """Let the next update leave parameters that no rank has used as they are. Collective.

        measured: metrics and FLAGS, summed over the ranks. None if they are not known before the update: the ranks then
            ask each other in the first step of a fit, and, if a parameter was unused there, in every step.
        """
        replica = self._replica
        if not replica.optional:
            return
        may_be = self._asks is not False if measured is None else measured[len(replica.metrics) + UNUSED]
        if not may_be:
            replica.still = np.zeros(replica.optional, bool)
            return
        used = (~self.unused).astype(np.int64)
        combine(comm, used, "learn which parameters no rank has used")
        replica.still = used == 0
        if measured is None and self._asks is None:
            self._asks = not used.all()

    # Updates

    def begin_step(self, number: int) -> None:
        """Begin step `number` of the training (0, 1, ...): set its learning rates, say."""
        for each in self.applied:
            each.begin_step(number)

    def end_step(self) -> None:
        """Undo `begin_step`, until the next one. Local."""
        for each in self.applied:
            each.end_step()

    def update(self, part: Slices | None = None) -> None:
        """Update the parameters by the gradients as they are. part: see Replica.update. The error of a transform is
        kept."""
        self._replica.update(ALL if part is None else part)
        for each in self.applied:
            self.keep(partial(each.updated, spans_in(self._replica, part)))


def mean_weight(replica: Replica, data: Data) -> float:
    """Return the mean weight that the replica's loss counts in these rows; 0 if there are none. Local."""
    rows = row_count(data[0])
    return weight_of(replica, data[1]) / rows if replica.counts and rows else float(rows > 0)


def sum_over_ranks(comm: MPI.Intracomm, own: Any) -> float:
    """Return the sum of the ranks' numbers, the same bits on all ranks. Collective: one small all-reduce."""
    everyone = np.zeros(comm.size)  # each rank fills its own element, so nothing is rounded on the way
    everyone[comm.rank] = float(own)
    return sum(combine(comm, everyone, NORM).tolist())


def logs_of(comm: MPI.Intracomm, rule: UpdateRule, same: bool) -> dict[str, float]:
    """Return the means of the transforms' meters in an epoch as logs. Collective.

    same: whether all ranks know the same values. After a failure a rank may lack one, so the longest list counts.
    """
    logs = {}
    for meter in rule.meters:
        sums = np.array(all_values(comm, meter.sums().tolist(), "learn the means of an epoch"))
        total, count = sums[sums[:, 1].argmax()] if same else sums.sum(axis=0)
        logs[meter.name] = float(total / count) if count else math.nan
    return logs
