"""MirroredOptimizer(average=Exact()): the gradients of each micro-batch are one term of an exact sum.

Micro-batch m of a step has the same rows on any number of ranks. The rank that has it computes its gradients alone,
with the buffers of the step's start and with random numbers that follow from m. All terms of all ranks are then summed
exactly (allreduce.algorithms.compressed.exact), so it does not matter which rank computed which.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Module

from allreduce.backend import AllReduce
from allreduce.errors import OptionError
from allreduce.transport.control import agree
from trainers.arguments import is_integer
from trainers.checks import GradientCheck, changed_alone
from trainers.data import keeping_generators, micro_batches_of, seed_generators, seed_of
from trainers.pytorch.buckets import Bucket, DenseBucket, Gradient, GradientError, changed
from trainers.replicas.pytorch.replica import Buffers, batch_norms, running_statistics
from trainers.replicas.pytorch.tensors import as_array, host_view

OUTSIDE = (
    "Exact: backward outside of a micro-batch; call it in `for rows in optimizer.micro_batches(len(x))`, which "
    "divides a batch among the ranks"
)
NOT_BEGUN = "Exact: there are no gradients: run `for rows in optimizer.micro_batches(len(x))` before each step"
LEFT = (
    "Exact: the loop over micro_batches() did not end before the next call (an exception, break, or step() or "
    "zero_grad() inside of the loop), so this batch has no average; all ranks may go on with the next one"
)


class MicroBatches:
    """This rank's micro-batches of a step: their gradients, and the running statistics after each of them.

    module: the model. gradients: of its parameters. flats: the buffers of the sums, by dtype. backend: sums exactly.
    size: rows of a micro-batch.

    count: the micro-batches of the step on all ranks; 0 before a step. used: the parameters that this rank has used.
    begun: whether a loop over them has begun, and neither ended nor been abandoned.
    """

    def __init__(
        self,
        module: Module,
        gradients: Sequence[Gradient],
        flats: dict[str, Tensor],
        backend: AllReduce,
        size: int,
    ) -> None:
        self._module, self._gradients, self._flats, self._size = module, gradients, flats, size
        self._backend: Any = backend
        self._buffers, self._checked = Buffers(module), False
        self._memory: list[dict[str, Tensor]] = []  # for the gradients of a micro-batch each
        self._views: list[list[Tensor]] = []  # of this memory, for each parameter
        self._statistics: list[np.ndarray] = []  # after each micro-batch, times its share of the rows
        self._error: Exception | None = None
        self._loop: object | None = None  # identifies the loop that has begun
        self._within = False  # whether a micro-batch has begun
        self.forget()

    def forget(self) -> None:
        """Drop the micro-batches of the step. Local."""
        self._undo()
        self._loop = None
        self.count, self.used = 0, set[int]()
        self._rows = self._seed = 0
        self._done = 0  # complete micro-batches of this rank
        self._statistics.clear()
        self._error = OptionError(NOT_BEGUN)

    @property
    def begun(self) -> bool:
        return self._loop is not None

    def _undo(self) -> None:
        """Restore the buffers if a micro-batch has begun and did not end. Local."""
        if self._within:
            self._buffers.restore()
        self._within = False

    # Computation

    def run(self, rows: Any, seed: Any, rank: int, ranks: int) -> Iterator[slice]:
        """Yield the rows of each micro-batch of this rank, during which its backward runs. Local.

        Bad arguments yield nothing; `agree` then raises the error on all ranks.
        """
        self.forget()
        loop = self._loop = object()
        try:
            numbers = self._numbers(rows, seed, rank, ranks)
        except OptionError as error:
            self._error, self._loop = error, None
            return
        self._error = None
        try:
            with keeping_generators():
                for number in numbers:
                    seed_generators(seed_of(seed, number))
                    span = slice(number * self._size, min((number + 1) * self._size, self._rows))
                    self._begin((span.stop - span.start) / self._rows)
                    yield span
                    if self._loop is not loop:
                        raise GradientError(LEFT)
                    self._end()
                    self._done += 1
            self._loop = None
        finally:  # also when the program leaves the loop; `begun` stays true, because the other ranks wait
            if self._loop is loop:
                self._undo()

    def _numbers(self, rows: Any, seed: Any, rank: int, ranks: int) -> range:
        """Keep the arguments of a step; return the numbers of this rank's micro-batches. Local. Raises OptionError."""
        for value, least, text in ((rows, 1, "the rows of the whole batch, "), (seed, 0, "seed=")):
            if not is_integer(value, least):
                raise OptionError(f"micro_batches() takes {text}an integer >= {least}, not {value!r}")
        self._rows, self._seed = int(rows), seed_of(int(seed))
        self.count = -(-self._rows // self._size)
        return micro_batches_of(self.count, rank, ranks)

    def _begin(self, share: float) -> None:
        self._buffers.save()
        if len(self._memory) == self._done:
            self._memory.append({dtype: torch.zeros_like(flat) for dtype, flat in self._flats.items()})
            self._views.append([gradient.view_of(self._memory[-1]) for gradient in self._gradients])
        for gradient in self._gradients:
            gradient.parameter.grad = None
        self._share, self._within, self._arrived = share, True, set[int]()

    def take(self, index: int, parameter: Tensor) -> None:
        """Take a gradient that autograd has computed, times the micro-batch's share of the rows. Local."""
        if not self._within:
            self._error = GradientError(OUTSIDE)  # also of the next average: `.grad` may have been one, and is no more
            raise self._error
        grad, view = parameter.grad, self._views[self._done][index]
        assert grad is not None
        if (grad.dtype, grad.shape) != (view.dtype, view.shape):
            raise GradientError(changed(self._gradients[index].name, grad, tuple(view.shape), view.dtype))
        grad = grad.to_dense() if grad.is_sparse else grad
        if index in self._arrived:
            view.add_(grad, alpha=self._share)
        else:
            torch.mul(grad, self._share, out=view)
        self._arrived.add(index)
        parameter.grad = None

    @torch.no_grad()
    def _end(self) -> None:
        for index, view in enumerate(self._views[self._done]):
            if index not in self._arrived:
                view.zero_()
        self.used |= self._arrived
        self._within = False
        statistics = running_statistics(self._module)
        if not self._checked:
            before = {name: each for name, each in self._buffers.saved().items() if name not in statistics}
            after = {name: self._module.get_buffer(name) for name in before}
            held = [{name: host_view(each) for name, each in group.items()} for group in (before, after)]
            wrong = changed_alone(*held)
            self._error = self._error or (OptionError(wrong) if wrong else None)
            self._checked = not wrong
        if statistics:
            flat = torch.cat([each.reshape(-1).double() for each in statistics.values()])
            self._statistics.append(flat.mul_(self._share).numpy())
        self._buffers.restore()

    # Sums

    def agree(self, comm: MPI.Intracomm) -> None:
        """Raise on all ranks unless all have done the same loop; average the statistics. Collective."""
        error = GradientError(LEFT) if self.begun else self._error
        self._undo()
        self._loop = None
        call = f"micro_batches({self._rows}), of {self._size} rows each; random numbers from {self._seed}"
        agree(comm, [self._rows, self._size, self._seed], call, error)
        self._average_statistics()

    @torch.no_grad()
    def _average_statistics(self) -> None:
        for norm in batch_norms(self._module):
            if norm.training and norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1
        statistics = list(running_statistics(self._module).values())
        if not statistics:
            return
        sums = np.zeros(sum(each.numel() for each in statistics))
        self._backend.sum_terms(self._statistics, sums, "sum", self.count)
        parts = torch.from_numpy(sums).split([each.numel() for each in statistics])
        for statistic, part in zip(statistics, parts, strict=True):
            statistic.copy_(part.view(statistic.shape))

    def add_up(self, layout: Bucket, sums: Any, kind: str) -> None:
        """Write the exact sums of a bucket of all ranks' gradients. kind: of the collective. Collective."""
        self._backend.sum_terms(self.terms(layout), sums, "sum", self.count, kind)

    def terms(self, layout: Bucket) -> list[np.ndarray]:
        """Return this rank's gradients of a bucket, an array for each micro-batch. Local."""
        span = slice(layout.start, layout.stop)
        return [as_array(held[layout.dtype][span]) for held in self._memory[: self._done]]


class ExactBucket(DenseBucket):
    """A DenseBucket whose average is the exact sum of the terms of all ranks' `micro_batches`. given: its arguments."""

    def __init__(self, *given: Any, micro_batches: MicroBatches) -> None:
        super().__init__(*given)
        self._micro_batches, self._sum = micro_batches, self._add_up

    def prepare(self) -> list[int]:
        unused = []
        for number, gradient in zip(self.parameters, self._gradients, strict=True):
            if number in self._micro_batches.used:
                gradient.parameter.grad = gradient.current_view()
            else:
                unused.append(number)
        return unused

    def weigh(self, weight: float) -> None:
        """Does nothing: each micro-batch is weighted by its rows."""

    def check(self, gradient_check: GradientCheck, number: int) -> None:
        for term in self._micro_batches.terms(self.layout):
            gradient_check.check_array(number, term)

    def _add_up(self) -> None:
        self._micro_batches.add_up(self.layout, self.memory.array, self.kind)
