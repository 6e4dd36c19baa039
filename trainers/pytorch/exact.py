"""MirroredOptimizer(exact=True): the gradients of each micro-batch are one term of an exact sum.

Micro-batch m of a step has the same rows on any number of ranks. The rank that has it computes its gradients alone,
with the buffers of the step's start and with random numbers that follow from m. All terms of all ranks are then summed
exactly (allreduce.wrappers.exact), so it does not matter which rank computed which.
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
from allreduce.transport.control import agree, combine, on_all_ranks
from trainers.backends import MICRO_BATCH
from trainers.checks import GradientCheck, changed_alone
from trainers.data import keeping_generators, micro_batches_of, seed_generators, seed_of
from trainers.pytorch.buckets import Bucket, DenseBucket, Flat, Gradient, GradientError, changed
from trainers.replicas.pytorch.replica import Buffers, batch_norms, running_statistics
from trainers.replicas.pytorch.tensors import as_array, host_view

OUTSIDE = (
    "exact=True: backward outside of a micro-batch; call it in `for rows in optimizer.micro_batches(len(x))`, which "
    "divides a batch among the ranks"
)
NOT_BEGUN = "exact=True: there are no gradients: run `for rows in optimizer.micro_batches(len(x))` before each step"


class MicroBatches:
    """This rank's micro-batches of a step: their gradients, and the running statistics after each of them.

    module: the model. gradients: of its parameters. flats: the buffers of the sums, by dtype. backend: sums exactly.
    size: rows of a micro-batch.

    count: the micro-batches of the step on all ranks; 0 before a step. used: the parameters that this rank has used.
    """

    def __init__(
        self,
        module: Module,
        gradients: Sequence[Gradient],
        flats: dict[str, Tensor],
        backend: AllReduce,
        size: int | None,
    ) -> None:
        self._module, self._gradients, self._flats, self._size = module, gradients, flats, size or MICRO_BATCH
        self._backend: Any = backend
        self._buffers, self._checked = Buffers(module), False
        self._memory: list[dict[str, Tensor]] = []  # for the gradients of a micro-batch each
        self._views: list[list[Tensor]] = []  # of this memory, for each parameter
        self._statistics: list[np.ndarray] = []  # after each micro-batch, times its share of the rows
        self._error: Exception | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the micro-batches of the step. Local."""
        self.count, self.used = 0, set[int]()
        self._done: list[int] = []  # the numbers of this rank's complete micro-batches
        self._statistics.clear()
        self._error, self._within = OptionError(NOT_BEGUN), False

    # Computation

    def run(self, rows: Any, mine: Sequence[int] | None, seed: int, rank: int, ranks: int) -> Iterator[slice]:
        """Yield the rows of each micro-batch of this rank, during which its backward runs. Local.

        Bad arguments yield nothing; `agree` then raises the error on all ranks.
        """
        self.forget()
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
            self._error = OptionError(
                f"micro_batches() takes the rows of the whole batch, an integer >= 1, not {rows!r}"
            )
            return
        self.count = -(-int(rows) // self._size)
        numbers = list(micro_batches_of(self.count, rank, ranks) if mine is None else mine)
        wrong = [each for each in numbers if each not in range(self.count)]
        if wrong:
            self._error = OptionError(
                f"micro_batches(mine=...) are numbers from 0 to {self.count - 1}, not {wrong[0]!r}"
            )
            return
        self._error = None
        with keeping_generators():
            for number in numbers:
                seed_generators(seed_of(seed, number))
                span = slice(number * self._size, min((number + 1) * self._size, int(rows)))
                self._begin((span.stop - span.start) / rows)
                yield span
                self._end()
                self._done.append(number)

    def _begin(self, share: float) -> None:
        self._buffers.save()
        if len(self._memory) == len(self._done):
            self._memory.append({dtype: torch.zeros_like(flat) for dtype, flat in self._flats.items()})
            self._views.append([gradient.view_of(self._memory[-1]) for gradient in self._gradients])
        for gradient in self._gradients:
            gradient.parameter.grad = None
        self._share, self._within, self._arrived = share, True, set[int]()

    def take(self, index: int, parameter: Tensor) -> None:
        """Take a gradient that autograd has computed, times the micro-batch's share of the rows. Local."""
        if not self._within:
            raise GradientError(OUTSIDE)
        grad, view = parameter.grad, self._views[len(self._done)][index]
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
        for index, view in enumerate(self._views[len(self._done)]):
            if index not in self._arrived:
                view.zero_()
        self.used |= self._arrived
        self._within = False
        statistics = running_statistics(self._module)
        if not self._checked:
            before = {name: each for name, each in self._buffers.saved().items() if name not in statistics}
            after = {name: self._module.get_buffer(name) for name in before}
            held = [{name: host_view(each) for name, each in group.items()} for group in (before, after)]
            if wrong := changed_alone(*held):
                self._error = OptionError(wrong)
            self._checked = True
        if statistics:
            flat = torch.cat([each.reshape(-1).double() for each in statistics.values()])
            self._statistics.append(flat.mul_(self._share).numpy())
        self._buffers.restore()

    # Sums

    def agree(self, comm: MPI.Intracomm) -> None:
        """Raise on all ranks unless every micro-batch was computed once; average the statistics. Collective."""
        agree(comm, [self.count, self._size], f"micro_batches(), {self.count} of {self._size} rows", self._error)
        times = np.bincount(np.array(self._done, np.intp), minlength=self.count)
        combine(comm, times, "count the micro-batches")
        if (times != 1).any():
            number = int(np.flatnonzero(times != 1)[0])
            found = f"micro-batch {number} of {self.count} was computed {times[number]} times"
            raise on_all_ranks(OptionError(f"{found}; one rank must compute it, once"), comm)
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

    def terms(self, layout: Bucket) -> list[np.ndarray]:
        """Return this rank's gradients of a bucket, an array for each micro-batch. Local."""
        span = slice(layout.start, layout.stop)
        return [as_array(held[layout.dtype][span]) for held in self._memory[: len(self._done)]]


class ExactBucket(DenseBucket):
    """A DenseBucket whose average is the exact sum of the terms of all ranks' `micro_batches`."""

    def __init__(
        self,
        layout: Bucket,
        memory: Flat,
        gradients: Sequence[Gradient],
        backend: AllReduce,
        scatter: bool,
        micro_batches: MicroBatches,
    ) -> None:
        super().__init__(layout, memory, gradients, backend, scatter)
        self._micro_batches = micro_batches
        self._backend: Any = backend
        self._kind = "reduce_scatter" if scatter else "all_reduce"

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

    def reduce(self) -> None:
        terms, count = self._micro_batches.terms(self.layout), self._micro_batches.count
        self._backend.sum_terms(terms, self.memory.array, "sum", count, self._kind)
