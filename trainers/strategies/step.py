"""The step of a synchronous training: it averages the gradients, and the owners of the parameters update them.

`Step` has the buffer of the gradients, and sums it over the ranks. `StepOwners` are the ranks that update: here all of
them, each its whole replica. trainers.strategies.sharded has ranks that update slices of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu
from allreduce.arrays.parts import Part
from allreduce.backend import AllReduce
from allreduce.transport.control import combine, together
from trainers.arrays.squares import sum_of_squares
from trainers.backends import bind_own
from trainers.data import Batch
from trainers.options.buckets import Buckets
from trainers.replica import Replica, Slices, clipped, parameter_slices, slices_of, snapshot_of
from trainers.state.adopt import Piece
from trainers.state.owners import Owners
from trainers.strategies.interface import Strategy
from trainers.strategies.overlap import overlap_of
from trainers.strategies.rule import FLAGS


class Step:
    """A step as a transaction: all ranks apply it, or none. A backend reduces the gradients of all ranks.

    The constructor is collective, and `bind` comes after it. buckets: None: the gradients are summed in one call.

    buffer: 1-D array from the backend: the gradients of this rank. measured: its metrics and FLAGS, and after the
        reduction their sums over the ranks. Both must be exact, so where gradients have 16 bits or are compressed,
        `measured` is an array of its own, which is reduced before the gradients; else it is the end of the buffer.
    owners: update the parameters. computes: whether this rank has gradients.
    """

    owners: "StepOwners"
    computes = True

    def __init__(self, strategy: Strategy, backend: AllReduce, buckets: Buckets | None = None) -> None:
        self.replica, self.rule, self.backend = strategy.replica, strategy.rule, backend
        self.comm, self.clock, self.span = strategy.group.comm, strategy.clock, strategy.clock.span
        dtype, length = self.replica.gradient_dtype, self.replica.gradient_length
        extra = len(self.replica.metrics) + len(FLAGS)
        self._length, self._device = length, self.replica.device
        self._ahead = backend.lossy or backend.sums_terms or dtypes.is_half(dtypes.parse(dtype))
        self.buffer = self.allocate(length if self._ahead else length + extra, dtype)
        self.measured = self.allocate(extra, "float32") if self._ahead else self.buffer[length:]
        self._told: Any = None  # memory of `tell`
        # bound collectives, by their kind and the id of their array
        self._bound: dict[tuple[str, int], Callable[[], object]] = {}
        self.owners = StepOwners(self, strategy.steps)
        self._overlap, self._early = None, False
        if buckets is not None and not self._ahead:
            self._overlap = overlap_of(backend, self.buffer, self.replica, buckets)
        self._rest = self.buffer if self._overlap is None else self.buffer[self.replica.parameter_count :]

    # Memory

    def allocate(self, length: int, dtype: str) -> Any:
        """Allocate an array on the replica's device, with the backend. Collective."""
        return self.backend.allocate(length, dtype, device=self._device)

    def bind(self) -> None:
        """Bind the replica to the buffer. Local."""
        bind_own(self.replica, self.gradients)
        self.describe(self.gradients)

    def describe(self, array: Any) -> None:
        """Tell the backend which parameters the elements of an allocated array belong to. Local."""
        self.backend.describe(array, _parts(self.replica))

    # Gradients of this rank

    @property
    def gradients(self) -> Any:
        """The gradients, with the statistics that may follow them: a view of the buffer."""
        return self.buffer[: self._length]

    @property
    def local_gradients(self) -> Any:
        """This rank's gradients of the current step, 1-D, before they are averaged; None if it computes none."""
        return self.gradients if self.computes else None

    def trained(self, part: Slices | None = None) -> list[Any]:
        """Return the gradients of the trained parameters, or of a part of them: views of the buffer. Local."""
        trained = clipped(part or slice(0, self._length), 0, self.replica.parameter_count)
        return [self.buffer[each] for each in slices_of(trained)]

    def compute(self, batch: Batch | None) -> None:
        """Compute the gradients of `batch`, or zeros if `batch` is None. Local; may raise any exception."""
        if batch is None or not self.computes:
            self.clear()
            self.measured[: len(self.replica.metrics)] = 0
            self.rule.take_none()
            return
        self.owners.check_edits()
        self.owners.begin_batch()
        self._compute(batch)

    def _compute(self, batch: Batch) -> None:
        metrics = len(self.replica.metrics)
        ready = self._overlap.ready if self._overlap is not None and self._early else None
        gpu.write(self.measured[:metrics], self.rule.gradients(batch, batch.share, self.gradients, ready=ready))
        self.measured[:metrics] *= batch.share

    def clear(self) -> None:
        """Set this rank's gradients and `measured` to zeros. Local."""
        if self._overlap is not None:
            self.buffer[: self._overlap.untaken] = 0
        self._rest[:] = 0

    @property
    def unfinished(self) -> bool:
        """Whether an error has ended the last fit in a step whose sums go on. Local."""
        return self._overlap is not None and self._overlap.unfinished

    def begin(self, early: bool, unfinished: bool) -> None:
        """Begin the steps of a fit. Collective. early: whether gradients may be summed while others are computed,
        because no callback looks at this rank's own. unfinished: the step of any rank is."""
        self._early = early
        if self._overlap is not None and unfinished:
            self._overlap.finish()
        elif self._overlap is not None:
            self._overlap.restart()  # an interrupted backward has told of some gradients

    # The step

    def __call__(self, flags: tuple[float, ...]) -> None:
        """Combine the gradients that `compute` left on each rank, and update the parameters. Collective.

        flags: this rank's values of FLAGS, in that order. On the CPU nothing is updated when a rank sets "failed".

        Each rank has weighted its gradients and metrics by its share of the batch already, so their sum is the mean
        over samples. Leaves in `measured` the metrics of the global batch, then the sums of the flags over the ranks:
        the same bits on all ranks. `clock` runs while this rank waits for others.
        """
        gpu.write(self.measured[len(self.replica.metrics) :], flags)
        self.owners.apply()

    def reduce(self, sum_up: Callable[[], object]) -> bool:
        """Sum `measured` and, by `sum_up`, the gradients over the ranks. See Owners.reduce. Collective."""
        if self._ahead:
            self.run("all_reduce", self.measured, lossless=True)
            if not self._begin_update(self._weighed()):
                return False
        sum_up()
        return self._ahead or self._begin_update(self.trained(self.owners.own_part))

    def _begin_update(self, gradients: Sequence[Any]) -> bool:
        """Return whether the step is to be applied, now that `measured` is known; then weigh these gradients by it.
        Collective. A GPU's flags are not read, because the host would wait for it."""
        on_host = self._device == "cpu"
        if on_host and self.measured[-1]:
            return False
        self.rule.weigh(self.measured, gradients)
        self.rule.hold_unused(self.comm, self.measured if on_host else None)
        return True

    def _weighed(self) -> Sequence[Any]:
        """Return the arrays that hold this rank's gradients of the parameters before they are reduced. Local."""
        return self.trained()

    @property
    def scatters(self) -> bool:
        """Whether `sum("reduce_scatter")` may leave a rank the sums of its chunk alone."""
        return True

    def sum(self, kind: str) -> None:
        """Sum the gradients over the ranks. kind: "all_reduce" or "reduce_scatter". Collective."""
        if self._overlap is not None:
            self.clock.start()
            self._overlap.finish()
            self.clock.stop()
        self.run(kind, self._rest)

    def tell(self, owned: Slices) -> None:
        """Give all ranks `measured`. Collective. owned: the part of the buffer of which this rank has the sums; the
        parts of all ranks are disjoint, and together the whole buffer."""
        if self._ahead:
            return
        if self._told is None:
            length, dtype = len(self.measured), self.replica.gradient_dtype
            self._told = np.zeros(length, dtype) if self._device == "cpu" else self.allocate(length, dtype)
        self._told[:] = 0
        for each in slices_of(clipped(owned, self._length, self.buffer.size)):
            self._told[each.start - self._length : each.stop - self._length] = self.buffer[each]
        if self._device == "cpu":
            self.clock.start()
            combine(self.comm, self._told, "a step of fit")  # one short message, however many the algorithm sends
            self.clock.stop()
        else:
            self.run("all_reduce", self._told)
        self.measured[:] = self._told

    def run(self, kind: str, array: Any, lossless: bool = False) -> None:
        """Run a collective on an array in place: "all_reduce" (sums), "reduce_scatter" or "all_gather". Collective.

        lossless: see AllReduce. The first call binds the array.
        """
        self.clock.start()
        if (kind, id(array)) not in self._bound:
            self._bound[kind, id(array)] = self.backend.bind(array, "sum", kind, lossless)
        self._bound[kind, id(array)]()
        self.clock.stop()


class StepOwners(Owners):
    """Owners that update the parameters in a Step: here all ranks, each its whole replica."""

    def __init__(self, step: Step, steps: int) -> None:
        self._step, self._replica, self._comm = step, step.replica, step.comm
        self._steps = self._since = steps  # the number of steps taken, and that number at the last update

    def reduce(self) -> bool:
        return self._step.reduce(self.sum_up)

    def sum_up(self) -> None:
        """Bring the sums of the gradients to the ranks that need them, and `Step.measured` to all. Collective."""
        self._step.sum("all_reduce")

    def transform(self) -> None:
        step = self._step
        part = self.own_part if step.scatters else None
        step.rule.transform(step.trained(part), part, self.squares)

    def squares(self) -> Any:
        """Return the sum of the squares of all gradients of this step. Collective."""
        return sum(map(sum_of_squares, self._step.trained()))

    def update(self) -> None:
        """As Owners.update, and count the step. Local."""
        with self._step.span("update"):
            self._step.rule.update(self.own_part)
        self._steps = self._since = self._steps + 1

    def set_steps(self, steps: int) -> None:
        """Set the number of steps taken, including steps in which nothing was updated. Local."""
        self._steps = self._since = steps

    def pieces(self) -> list[Piece]:
        """Return this rank's state as pieces: here a copy of everything in one piece. The next step may overwrite
        them. Local."""
        return [Piece(self._since, self._steps, 0, self._step.buffer.size, {}, snapshot_of(self._replica, {}))]

    def snapshot(self, memory: dict[str, np.ndarray], wanted: bool) -> dict[str, np.ndarray]:
        return together(self._comm, lambda: snapshot_of(self._replica, memory) if wanted else {})

    def close(self) -> None:
        """Move the replica's parameters back into memory of its own, and load its complete state. Collective."""

    def abandon(self) -> None:
        """Drop memory that the ranks share. Local."""


def _parts(replica: Replica) -> list[Part]:
    """Return the parameters of a replica by their positions in the gradients; [] if the replica does not tell."""
    slices = parameter_slices(replica)
    if not slices or slices[-1].stop != replica.gradient_length:
        return []
    return [Part(name, each.start, shape) for each, (name, shape) in zip(slices, replica.shapes.items(), strict=True)]
