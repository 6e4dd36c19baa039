"""Averages gradients: they live in the backend's memory, and are reduced when backward ends, or during it.

A gradient's way: autograd -> the view in the buffer that the backend allocated -> reduced where it is ->
read there by the optimizer. Autograd makes the first gradient of a step in memory of its own, since nobody
can tell it where; a hook moves it into the view, and later ones (accumulation) are added to the view.

When backward returns, `.grad` of every parameter holds the average over the ranks, as with PyTorch's
DistributedDataParallel, so what a loop does between backward and step (clipping, say) sees averages.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from allreduce.base import AllReduce
from allreduce.errors import AllReduceError
from allreduce.messages.worker import Pending
from trainers.pytorch.layout import Bucket, plan
from trainers.pytorch.ownership import refuse
from trainers.pytorch.report import Clock
from trainers.pytorch.rollcall import RollCall
from trainers.replicas.pytorch.tensors import DTYPES, TORCH, as_tensor, shaped

LOCAL, SCATTERED, AVERAGED = "local", "scattered", "averaged"  # what the buffers hold; see Averager.state

Submit = Callable[[Callable[[], object]], Pending]


class GradientError(AllReduceError, RuntimeError):
    """Gradients were produced, changed or left out in a way in which they can't be averaged."""


def at_once(work: Callable[[], object]) -> Pending:
    """A `Submit` that does the work in the calling thread."""
    pending = Pending(work)
    pending.run()
    return pending


class Averager:
    """The gradients of some parameters, in buckets of flat buffers, and their reduction.

    parameters: those that are trained, in the order of the model, by name.
    backend: allocates the buffers.
    reduce: what is done with each bucket, a 1-D array, in place; it leaves the averages of the whole bucket
        (`reduces_to` AVERAGED) or of the part that this rank owns (SCATTERED).
    submit: runs the reductions, at once or in a thread; during: they are submitted while backward goes on.

    state: LOCAL: there may be gradients of this rank that are not averaged yet. SCATTERED: averages in what
        this rank owns of each bucket, leftovers elsewhere. AVERAGED: averages everywhere.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        backend: AllReduce,
        rollcall: RollCall,
        *,
        reduce: Callable[[np.ndarray], object],
        reduces_to: str,
        submit: Submit,
        during: bool,
        bucket_bytes: tuple[float, float],
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self._rollcall, self._reduce, self._reduces_to = rollcall, reduce, reduces_to
        self._submit, self._during = submit, during
        sizes = [(each.numel(), DTYPES[each.dtype], each.element_size()) for each in self.parameters]
        self.plan, lengths = plan(sizes, *(bucket_bytes if during else (math.inf, math.inf)))
        arrays = {dtype: backend.allocate(length, dtype) for dtype, length in lengths.items()}
        self.flats = {dtype: as_tensor(array, TORCH[dtype]) for dtype, array in arrays.items()}
        self.buckets = [_Bucket(each, arrays[each.dtype]) for each in self.plan]
        self.sizes = tuple(bucket.array.nbytes for bucket in self.buckets)
        self._bucket_of = {slot.parameter: bucket for bucket in self.buckets for slot in bucket.plan.slots}
        self.views = [self.place(index, self.flats) for index in range(len(self.parameters))]
        self.state = LOCAL
        self.enabled = True  # False inside of no_sync()
        self.clock = Clock()
        self._ending: weakref.ref | None = None  # to what autograd calls when the backward under way ends
        self._next = 0  # the first bucket that was not submitted yet
        self._pending: list[Pending] = []  # the roll call and reductions of an average that has not ended
        self.leftover: set[int] = set()  # parameters whose .grad holds the leftovers of a SCATTERED reduction
        self._versions: list[int] = []
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, each in enumerate(self.parameters)
        ]

    def place(self, index: int, flats: dict[str, Tensor]) -> Tensor:
        """The place of a parameter in `flats` (by dtype), which are laid out like the gradients: a view."""
        bucket = self._bucket_of[index].plan
        slot = next(each for each in bucket.slots if each.parameter == index)
        return shaped(flats[bucket.dtype], slot.start, self.parameters[index])

    # Called by autograd

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        """The gradient of a parameter is complete, as far as this backward goes."""
        first = self._ending is None or self._ending() is None  # a backward that raises drops it without a call
        if first:
            self.abandon()
        self._adopt(index)
        if not self.enabled:
            self.state = LOCAL
            return
        if first:
            self._begin()
            ending = partial(self._finish)
            self._ending = weakref.ref(ending)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
        if self._during:
            self._count(index)

    def _count(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if index not in bucket.missing:
            raise GradientError(
                f"{self.names[index]} received its gradient twice in one backward, so it may be half reduced; "
                "use torch.utils.checkpoint with use_reentrant=False, or MirroredOptimizer(..., overlap=False)"
            )
        bucket.missing.remove(index)
        # In the order of the index on every rank, whatever is ready first: collectives match by their order.
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch()

    # Averaging

    def finish(self) -> None:
        """See that nothing is LOCAL any more. Collective: a rank whose backward has done it waits for nobody."""
        if self.state == LOCAL:
            self._begin()
            self._finish()

    def _begin(self) -> None:
        self.abandon()
        self._next, self.state = 0, LOCAL
        for bucket in self.buckets:
            bucket.missing = {slot.parameter for slot in bucket.plan.slots}

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduce what is left, wait for everything, and hand the averages to the parameters."""
        begin = self.clock.now()
        try:
            while self._next < len(self.buckets):
                self._launch()
        finally:
            done = self._outcomes()
        self.clock.add(done[1:], begin)  # the first is the roll call
        if any(np.isnan(bucket.flags).any() for bucket in self.buckets):
            raise GradientError(
                "backward raised on another rank after a part of its gradients had been averaged, so these "
                "averages mean nothing; the error is that rank's. Let it end the job, or use overlap=False"
            )
        self._rollcall.averages += 1
        self._set(self._reduces_to)

    def _outcomes(self) -> list[Pending]:
        """Wait for all that is pending, raise the first error, and return what was pending."""
        done, self._pending, self._ending = self._pending, [], None
        errors = [error for each in done if (error := _outcome(each)) is not None]
        if errors:
            raise errors[0]
        return done

    def abandon(self) -> None:
        """End an average that backward began before it raised, as the other ranks wait for it.

        Collective only then. What it was to give is marked as invalid by the flags of the remaining buckets.
        """
        if self._pending:
            for bucket in self.buckets[self._next :]:
                bucket.flags[:] = math.nan
                self._submit_reduction(bucket)
            self._outcomes()

    @torch.no_grad()
    def _launch(self) -> None:
        if self._next == 0:
            self._pending.append(self._submit(lambda: self._rollcall("averages gradients")))
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.unused = [at for at, slot in enumerate(bucket.plan.slots) if self._ready(slot.parameter) is None]
        for at in bucket.unused:
            self.views[bucket.plan.slots[at].parameter].zero_()
        bucket.flags[:] = 1
        bucket.flags[bucket.unused] = 0
        self._submit_reduction(bucket)

    def _submit_reduction(self, bucket: "_Bucket") -> None:
        self._pending.append(self._submit(lambda: None if self._rollcall.broken else self._reduce(bucket.array)))

    def _ready(self, index: int) -> Tensor | None:
        """The gradient of a parameter, in its place; None when it has none."""
        if self.parameters[index].grad is None:
            return None
        if self._adopt(index) and index in self.leftover:
            raise GradientError(
                f"{self.names[index]} got a second gradient after its first was averaged in slices "
                '(update="sharded"): compute all gradients of a step but the last inside of '
                "optimizer.no_sync(), and call optimizer.zero_grad() between steps, not model.zero_grad()"
            )
        return self.views[index]

    def _adopt(self, index: int) -> bool:
        """Make .grad the view into the buffer. True when it was that already."""
        parameter, view = self.parameters[index], self.views[index]
        grad = parameter.grad
        if grad is view:
            return True
        assert grad is not None
        view.copy_(grad.to_dense() if grad.is_sparse else grad)
        parameter.grad = view
        self.leftover.discard(index)
        return False

    def _set(self, state: str) -> None:
        self.state = state
        self.leftover = set(range(len(self.parameters))) if state == SCATTERED else set()
        self._versions = [each._version for each in self.flats.values()]
        if state == AVERAGED:
            for bucket in self.buckets:
                for at in bucket.unused:
                    if bucket.flags[at] > 0:  # some other rank has used it
                        index = bucket.plan.slots[at].parameter
                        self.parameters[index].grad = self.views[index]

    def gathered(self, gather: Callable[[np.ndarray], object]) -> None:
        """Go from SCATTERED to AVERAGED. Collective. gather: fills a bucket from what the ranks own."""
        for bucket in self.buckets:
            self.clock.communicate(partial(gather, bucket.array))
        self._set(AVERAGED)

    def check_unchanged(self) -> None:
        """Raise when SCATTERED gradients were edited: clipped by a norm of leftovers, for example."""
        if self.state == SCATTERED and self._versions != [each._version for each in self.flats.values()]:
            raise GradientError(
                'gradients were changed between backward and step(), and with update="sharded" a rank has the '
                "averages of its own slice only; call optimizer.synchronize() first (before clipping, before "
                "GradScaler.unscale_ or GradScaler.step), which gathers them"
            )

    def forget(self, release: bool) -> None:
        """The gradients are used up: the next ones are new. release: .grad of every parameter becomes None."""
        self.abandon()
        self.state = LOCAL
        if release:
            self.leftover = set()
            for parameter in self.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Let go of the memory (`.grad` becomes None), and refuse backward from now on."""
        for hook in self._hooks:
            hook.remove()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None
        refuse(self.parameters)
        self.views.clear()
        self.flats.clear()
        self.buckets.clear()
        self._bucket_of.clear()


def _outcome(pending: Pending) -> BaseException | None:
    try:
        pending.wait()
    except BaseException as error:
        return error
    return None


class _Bucket:
    """A bucket's memory, and what is known of it in the present backward."""

    def __init__(self, bucket: Bucket, array: np.ndarray) -> None:
        self.plan = bucket
        self.array = array[bucket.start : bucket.stop]
        self.flags = array[bucket.flags]
        self.missing: set[int] = set()  # parameters whose gradient this backward has not produced yet
        self.unused: list[int] = []  # numbers of the slots that had no gradient on this rank
