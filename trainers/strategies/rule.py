"""StepOptions, the options of a step of a fit; and UpdateRule, which computes and applies gradients with these options.

Every strategy but Exact, which computes its micro-batches itself, computes gradients by `UpdateRule.gradients`, in
micro-batches one after the other if there are several. All update by `UpdateRule.apply`: clip the gradients, update the
parameters, move their average.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.arrays.chunks import chunk
from allreduce.transport.control import all_values, combine
from trainers.data import Batch, Data, row_count, sliced
from trainers.options.transforms import EMA, Accumulate, ClipNorm, Schedule
from trainers.replica import ALL, Replica, Slices, gradients_of, parameter_slices, spans_in, undo_batch, weight_of
from trainers.strategies.alike import MARKS
from trainers.transforms import average, clip
from trainers.transforms.clip import scale, sum_of_squares
from trainers.watching.learning_rate import StepSchedule
from trainers.watching.meter import NormMeter

NORM = "learn the norm of the gradients"
# FLAGS are appended to each step's metrics; after the reduction they are the numbers of ranks that set the flag
# (MARKS: of the fingerprint of the next batch, if all ranks read the same ones, see strategies.alike)
# ("rows": the rows of the next batch, if the batches are a stream)
# ("weight": the mean weight that the loss has counted in the rows)
FLAGS = ("left_out", *MARKS, "rows", "weight", "unused", "stop", "save", "failed")
WEIGHT, UNUSED = FLAGS.index("weight"), FLAGS.index("unused")
ONE = 1e-6  # a mean weight this close to 1 is 1: shares of a batch are rounded


class StepOptions(NamedTuple):
    """The options of a step of a fit: what its transforms ask for."""

    accumulate: int = 1
    clip_norm: float | None = None
    ema: float | None = None
    schedule: Schedule | None = None

    @classmethod
    def of(cls, transforms: Mapping[type, Any]) -> "StepOptions":
        """Return the options that these transforms, by their classes, ask for."""
        micro, clip, ema = (transforms.get(each) for each in (Accumulate, ClipNorm, EMA))
        return cls(
            micro.micro_batches if micro else 1,
            clip and clip.norm,
            ema and ema.decay,
            transforms.get(Schedule),
        )

    def error(self, replica: Replica) -> str:
        """Return why this replica can't be trained with these options, as text; "" if it can. Local."""
        rates = replica.learning_rates
        if self.schedule is None or any(rate > 0 for rate in rates):
            return ""
        return f"the learning rates of this replica are {rates}; a Schedule needs one above 0 that can be set"


class UpdateRule:
    """Computes the gradients of a batch, and updates a replica by averaged gradients. Local, but for `hold_unused`.

    options: of the fit. norms: the norms of the gradients of an epoch. schedule: sets the learning rates of a step, if
    there is one.
    weight: the mean weight that the loss has counted in the rows of the last batch, times this rank's share of it.
    unused: the parameters for which the last batch gave no gradient; see Replica.unused.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.options = StepOptions()
        self.norms = NormMeter()
        self.schedule: StepSchedule | None = None
        self._sum: Any = None  # of the gradients of the micro-batches so far
        self._asks: bool | None = None  # whether ranks ask each other in each step, see `hold_unused`; None: not known
        self.take_none()

    def use(self, options: StepOptions) -> None:
        """Use these options from now on. Local, called on all ranks."""
        self.options, self._sum, self._asks = options, None, None
        self.norms = NormMeter()
        self.schedule = StepSchedule(options.schedule) if options.schedule else None
        self._replica.undoable |= options.accumulate > 1

    def keep_average(self, trains: bool) -> None:
        """Keep an average of the parameters, or drop it if this fit trains without one. Local, called on all ranks."""
        if self.options.ema is not None or trains:
            average.keep(self._replica, self.options.ema)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.options.clip_norm is not None

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

        With Accumulate(k), the rows are divided into k micro-batches, which are computed one after the other, each from
        the statistics of the step's start, as ranks compute theirs. Running statistics become the mean of those of the
        micro-batches. replica: by default the strategy's. ready: see Replica.ready; called in the last micro-batch.
        """
        replica = replica or self._replica
        rows = batch.own
        count = min(self.options.accumulate, rows)
        self.weight = share * mean_weight(replica, batch.data)
        if count < 2:
            values = gradients_of(replica, batch.data, share, ready)
            self.unused = replica.unused
            return values
        self.unused = np.ones(replica.optional, bool)
        means: Any = 0.0
        for number in range(count):
            span = chunk(rows, count, number)
            part = (span.stop - span.start) / rows
            if number:
                undo_batch(replica)  # each micro-batch begins with the statistics of the step's start
                self._sum = memory.copy() if self._sum is None else self._sum
                self._sum[:] = memory  # which the replica overwrites
            left = dict(enumerate(parameter_slices(replica))) if ready and number + 1 == count else {}
            told = self._adding(memory, left, ready) if ready and left else None
            values = gradients_of(replica, sliced(batch.data, span), share * part, told)
            if number:
                for each in (*left.values(), slice(replica.parameter_count if told else 0, None)):
                    memory[each] += self._sum[each]
            self.unused = self.unused & replica.unused
            means = means + part * (values if gpu.is_gpu_array(values) else np.asarray(values, np.float64))
        return means

    def _adding(self, memory: Any, left: dict[int, slice], ready: Callable[[int], None]) -> Callable[[int], None]:
        """Return the `ready` of the last micro-batch: it adds the sum of the ones before to a parameter's gradients.

        left: the slices of the parameters that were not told; the function removes its own.
        """

        def told(parameter: int) -> None:
            if parameter in left:  # else the strategy refuses the second time
                part = left.pop(parameter)
                memory[part] += self._sum[part]
            ready(parameter)

        return told

    def take_none(self) -> None:
        """Take note that this rank has no batch in this step. Local."""
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
        """Set the learning rates of step `number` of the training (0, 1, ...)."""
        if self.schedule is not None:
            self.schedule.set(self._replica, number)

    def end_step(self) -> None:
        """Set the learning rates from before the fit, until the next `begin_step`. Local."""
        if self.schedule is not None:
            self.schedule.end(self._replica)

    def apply(self, gradients: Sequence[Any], part: Slices | None = None, squares: Any = None) -> None:
        """Clip averaged gradients, update the parameters by them, and move the parameters' average.

        gradients: 1-D arrays: those of all parameters, without statistics, or those in `part` that this rank has. part:
            see Replica.update. squares: the sum of the squares of all gradients of all ranks, if these are only a part.
        """
        self.clip(gradients, squares)
        self.update(part)

    def update(self, part: Slices | None = None) -> None:
        """Update the parameters, without clipping, and move their average. part: see Replica.update."""
        self._replica.update(ALL if part is None else part)
        if self._replica.average is not None:
            self._replica.average.move(spans_in(self._replica, part))

    def clip(self, gradients: Sequence[Any], squares: Any = None) -> None:
        """Scale gradients so that their norm is at most `clip_norm`. See `apply`."""
        if self.options.clip_norm is None:
            return
        squares = sum(map(sum_of_squares, gradients)) if squares is None else squares
        norm, _ = clip.clip(gradients, self.options.clip_norm, squares)
        self.norms.set(norm)


def mean_weight(replica: Replica, data: Data) -> float:
    """Return the mean weight that the replica's loss counts in these rows; 0 if there are none. Local."""
    rows = row_count(data[0])
    return weight_of(replica, data[1]) / rows if replica.counts and rows else float(rows > 0)


def sum_over_ranks(comm: MPI.Intracomm, own: Any) -> float:
    """Return the sum of the ranks' numbers, the same bits on all ranks. Collective: one small all-reduce."""
    everyone = np.zeros(comm.size)  # each rank fills its own element, so nothing is rounded on the way
    everyone[comm.rank] = float(own)
    return sum(combine(comm, everyone, NORM).tolist())


def logs_of(comm: MPI.Intracomm, rule: UpdateRule, same: bool) -> Mapping[str, float]:
    """Return the mean norm of the gradients of an epoch as logs, {} if they are not clipped. Collective.

    same: whether all ranks know the same norms. After a failure a rank may lack one, so the longest list counts.
    """
    if not rule.clips:
        return {}
    sums = np.array(all_values(comm, rule.norms.sums().tolist(), "learn the norms of an epoch"))
    total, count = sums[sums[:, 1].argmax()] if same else sums.sum(axis=0)
    return {NormMeter.name: float(total / count) if count else math.nan}
