"""Averages gradients: they live in the backend's memory, and are reduced when backward ends, or during it.

The way of a gradient: autograd -> a view of the buffer that the backend allocated -> reduced there -> read there by
the optimizer. Autograd makes the first gradient of a step in memory of its own, which can't be given to it. A hook
moves the gradient into the view, and later ones (accumulation) are added to the view.

When backward returns, `.grad` of every parameter is the average, so that clipping before step() uses the average.
"""

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce.arrays import dtypes
from allreduce.backend import AllReduce, TwoPhase
from allreduce.engine.queue import Future, Queue
from allreduce.transport import ulfm
from allreduce.transport.control import raise_together
from allreduce.transport.wait import waiting
from trainers import checks
from trainers.checks import GradientArray, GradientCheck, Span
from trainers.errors import NotFiniteError
from trainers.pytorch.buckets import GradientError, Marks, changed, flat, plan, version_of
from trainers.pytorch.hooks import CLOSED, refuse, take_over
from trainers.pytorch.optimizer_group import OptimizerGroup
from trainers.pytorch.report import Clock, Report
from trainers.pytorch.rows import Rows
from trainers.pytorch.sparse import SparseGradients
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import DTYPES, numpy_dtype, shaped

LOCAL, SCATTERED, AVERAGED = "local", "scattered", "averaged"  # the contents of the buffers; see Reducer.state

EDITED = (
    'gradients were changed between backward and step(), and with update="sharded" a rank has the averages of its own '
    "slice only; call optimizer.synchronize() first (before clipping, before GradScaler.unscale_ or GradScaler.step), "
    "which gathers them"
)
SECOND = (
    'got a second gradient after its first was averaged in slices (update="sharded"): compute all gradients of a step '
    "but the last inside of optimizer.no_sync(), and call optimizer.zero_grad() between steps, not model.zero_grad()"
)

# FullyShardedDataParallel too calls these of autograd, for which PyTorch has no public names.
_backward_number: Callable[[], int] = attrgetter("_C._current_graph_task_id")(torch)
_call_when_backward_ends = attrgetter("_execution_engine.queue_callback")(torch.autograd.Variable)

ResultT = TypeVar("ResultT")


class Reducer:
    """The gradients of some parameters, in buckets of flat buffers, and their reduction.

    parameters: with dense gradients, in the order of the model, by name. sparse: the parameters with sparse gradients.
        Each of these is a bucket of its own, after the others, and is averaged whole, never SCATTERED.
    bucket_bytes: the least size of the first bucket, and of the others.
    queue: runs the reductions, in one order on all ranks. during: while backward goes on. comm: used in its calls only.
    backend: allocates the buffers and reduces them. scatter: it leaves the averages of the part of each bucket that
        this rank owns (state SCATTERED), and not of the whole bucket (AVERAGED). check_gradients: as of
        MirroredOptimizer.
    group, number: the optimizers on these ranks, and the number of this one. guard: entered round autograd's
        callbacks, where a rank may be found to have failed. device: of the parameters.

    state: LOCAL: there may be gradients of this rank that are not averaged yet. SCATTERED: averages in what
        this rank owns of each bucket, leftovers elsewhere. AVERAGED: averages everywhere.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        sparse: SparseGradients,
        *,
        bucket_bytes: tuple[float, float],
        queue: Queue,
        during: bool,
        comm: MPI.Intracomm,
        backend: AllReduce,
        scatter: bool,
        check_gradients: str | None,
        group: OptimizerGroup,
        number: int,
        guard: Callable[[], AbstractContextManager[None]],
        device: Host,
    ) -> None:
        self.names, self.parameters, self.sparse = list(parameters), list(parameters.values()), sparse
        self._queue, self.during, self.comm, self.group, self.number = queue, during, comm, group, number
        self._backend, self.guard, self.device = backend, guard, device
        self.ranks = comm.size  # also known after close()
        self._reduce: Callable[[np.ndarray], object] = partial(backend, op="mean")
        self._reduces_to = SCATTERED if scatter else AVERAGED
        sizes = [(each.numel(), DTYPES[each.dtype], each.element_size()) for each in self.parameters]
        self.plan, lengths = plan(sizes, *(bucket_bytes if during else (math.inf, math.inf)))
        memories = {dtype: flat(backend, length, dtype, device) for dtype, length in lengths.items()}
        self.flats = {dtype: memory.tensor for dtype, memory in memories.items()}
        self.buckets = [memories[bucket.dtype].part(bucket.start, bucket.stop) for bucket in self.plan]
        self.owned = [slice(0, memory.array.size) for memory in self.buckets]  # of each bucket what is averaged here
        if scatter:
            assert isinstance(backend, TwoPhase)
            self._reduce = partial(backend.reduce_scatter, op="mean")
            self.owned = [backend.owned(whole.stop) for whole in self.owned]
        self.sizes = tuple(memory.array.nbytes for memory in self.buckets)
        self._slots = {slot.parameter: (at, slot) for at, bucket in enumerate(self.plan) for slot in bucket.slots}
        self.bucket_of = {parameter: at for parameter, (at, _) in self._slots.items()}
        rest = range(len(sparse.parameters))
        self.bucket_of |= {len(self.parameters) + at: len(self.buckets) + at for at in rest}
        self._all = [*self.parameters, *sparse.parameters]
        self.views = [self.view(index, self.flats) for index in range(len(self.parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        self.state = LOCAL
        self._in_charge = False  # of the model's gradients; see take_over
        self.enabled = True  # False inside of no_sync()
        # During a step with a closure, which can't be left out, and keeps its rows: a closure begins with zero_grad().
        self.in_closure = False
        self.check = None if check_gradients is None else GradientCheck(check_gradients, self._gradient_arrays())
        self.clock = Clock()
        self.rows: Rows | None = None  # of the batches of this step, where they were told
        self._spent: Rows | None = None  # the rows of the last average
        self.joining = False  # inside of join(): ranks that tell no rows count as one each
        self.steps = self.averages = self._begun = 0
        self.leftover: set[int] = set()  # parameters whose .grad holds the leftovers of a SCATTERED reduction
        self._of_others: list[int] = []  # parameters that other ranks have used, and this one has not
        self._backward: Backward | None = None  # the one under way, or what remains of one that raised
        self._versions: list[int] = []
        self._marks = Marks(self.flats, self.plan, self.owned, device)
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, each in enumerate(self._all)
        ]

    def take_over(self, owner: object) -> None:
        """Become the only one that averages these parameters; backward raises after `close`. Local."""
        take_over(self._all, owner)
        self._in_charge = True

    def view(self, index: int, flats: dict[str, Tensor]) -> Tensor:
        """The view of a parameter in `flats` (by dtype), which have the layout of the gradients."""
        at, slot = self._slots[index]
        return shaped(flats[self.plan[at].dtype], slot.start, self.parameters[index])

    # A gradient's way: the hook, the backward, the bucket, the average

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        """A hook: this backward has completed the gradient of a parameter."""
        backward = self._backward
        running = backward is not None and backward.running()
        if not running:
            self.abandon()
        if index < len(self.parameters):
            self._adopt(index)
        if not self.enabled:
            self.state = LOCAL
            return
        if not running:
            backward = self._begin()
            backward.begin()
        if self.during:
            assert backward is not None
            backward.arrived(index)

    def _begin(self) -> "Backward":
        if self.joining and self.rows is None:
            self.count_rows(1)
        self.state = LOCAL
        if self.check is not None:
            self.check.begin()
        self._backward = Backward(self, self._call("averages gradients"))
        self._begun += 1
        return self._backward

    def prepare(self, bucket: int) -> list[int]:
        """Have a bucket hold this rank's gradients, or zeros. Returns the parameters without a gradient."""
        if bucket >= len(self.buckets):
            number = bucket - len(self.buckets)
            return [] if self.sparse.prepare(number) else [len(self.parameters) + number]
        unused = []
        for slot in self.plan[bucket].slots:
            index = slot.parameter
            if self.parameters[index].grad is None:
                self._view(index).zero_()
                unused.append(index)
            elif self._adopt(index, look=True) and index in self.leftover:
                raise GradientError(f"{self.names[index]} {SECOND}")
        return unused

    def reduce(self, bucket: int) -> None:
        """Reduce a bucket, weighted by the rows of the ranks where these are known. Runs in the queue."""
        rows, check = self.rows, self.check
        if bucket >= len(self.buckets):
            weight = 1.0 if rows is None else rows.weight
            look = None if check is None else partial(check.look_at_rows, bucket)
            return self.sparse.average(bucket - len(self.buckets), weight, look)
        memory = self.buckets[bucket]
        if rows is not None:
            rows.weigh(memory.tensor)
        if check is not None:
            check.look(bucket, memory.fetched())
        memory.through(self._reduce, writes=self.owned[bucket])

    def _gradient_arrays(self) -> list[GradientArray]:
        """The gradients of each bucket, for their check."""
        arrays = []
        for bucket in self.plan:
            slots = [(self.names[slot.parameter], slot) for slot in bucket.slots]
            spans = [Span(name, slot.start - bucket.start, slot.stop - slot.start) for name, slot in slots]
            own = dtypes.parse(bucket.dtype)
            arrays.append(GradientArray(spans, own, self._backend.sent(own)))
        tables = zip(self.sparse.names, self.sparse.parameters, strict=True)
        return arrays + [checks.table(name, each.numel(), numpy_dtype(each.dtype)) for name, each in tables]

    def overflowed(self, bucket: int) -> int:
        """The first element of a bucket whose average is no number on any rank; -1 for none. Runs in the queue."""
        if bucket >= len(self.buckets):
            indices, values = self.sparse.averages[bucket - len(self.buckets)]
            return checks.overflowed(self.comm, values.reshape(-1), partial(checks.element_of, indices, values))
        owned = self.owned[bucket]
        return checks.overflowed(self.comm, self.buckets[bucket].array[owned], owned.start.__add__)

    def finish(self, backward: "Backward") -> None:
        """Reduce what is left, wait for everything, and hand the averages to the parameters."""
        begin = self.clock.now()
        try:
            backward.finish()
            if self.rows is not None:
                self.rows.wait()
        except Exception:  # not an interrupt: what was submitted still goes on then
            self._backward = self.rows = None  # the rows were those of the gradients that have failed
            raise
        self._backward = None
        self.clock.add(backward.futures, begin)
        self.averages += 1
        self._spent = self.rows
        dense = len(self.parameters)
        self._of_others = [each for each in backward.unused if each < dense and backward.used[each]]
        self.sparse.hand_over(backward.used[dense:])
        self._become(self._reduces_to)

    def average(self) -> None:
        """Average the gradients unless a backward has done so. Collective."""
        self.abandon()
        if self.state == LOCAL:
            backward = self._begin()
            meet([backward])
            self.finish(backward)

    def synchronize(self) -> None:
        """Make the averages whole on every rank. Collective. All ranks raise the error about edits of one."""
        self.average()
        if self.state == SCATTERED:
            work = partial(self._gather, self.take_edits())
            self.clock.communicate(partial(self.together, "gathers gradients", work))

    def _gather(self, error: GradientError | None) -> None:
        """Go from SCATTERED to AVERAGED. Runs in the queue. error: of this rank, raised on all of them."""
        raise_together(self.comm, error)
        assert isinstance(self._backend, TwoPhase)
        for memory, owned in zip(self.buckets, self.owned, strict=True):
            memory.through(self._backend.all_gather, reads=owned)
        self._become(AVERAGED)

    def join_in(self) -> Callable[[], None]:
        """Take part in an average that other ranks have begun; call the result to finish it."""
        self.abandon()
        backward = self._begin()
        backward.launch_rest()
        return partial(self.finish, backward)

    def abandon(self) -> None:
        """End an average that backward began before it raised, if the other ranks wait for it. Collective only then."""
        backward = self._backward
        if backward is None:
            return
        self._backward = None
        if backward.futures or self.during:
            backward.abandon()
            self.rows = None
        else:
            self._begun -= 1

    # The queue

    def _call(self, what: str) -> str:
        """The text of a call, with all counts that must be alike on the ranks."""
        return f"{what}, after {self.steps} steps and {self._begun} averages"

    def submit(self, work: Callable[[], object], what: str) -> Future:
        """Have `work` called in the queue. Local. Errors of a failed rank are raised by waiting for the result:

        autograd may be running here, and a recovery can't run inside of it.
        """
        try:
            return self._queue.submit(work, what)
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            future = Future(work)
            future.finish(error)
            return future

    def together(self, what: str, work: Callable[[], ResultT]) -> ResultT:
        """Do `work` in the queue, at the same time on all ranks, and wait for it. Collective."""
        self.abandon()
        results: list[ResultT] = []
        crossing = self.device.crossing()

        def inside() -> None:
            with crossing.inside():
                results.append(work())

        crossing.leave()
        try:
            self._queue.submit(inside, self._call(what)).wait()
        finally:
            crossing.back()
        return results[0]

    def count_rows(self, mine: float, active: bool = True) -> Rows:
        """Begin to count the rows of this step. active: False when this rank has no batches left. Collective."""
        self.abandon()
        self.rows = Rows(partial(self.submit, what=self._call("counts rows")), self.comm, mine, active)
        return self.rows

    # .grad and the buffers

    def _adopt(self, index: int, look: bool = False) -> bool:
        """Make .grad the view into the buffer. True when it was that already.

        look: also check that the view has its memory still; module.double() gives it other memory.
        """
        parameter, view = self.parameters[index], self.views[index]
        grad = parameter.grad
        if grad is view and not look:
            return True
        view = self._view(index)
        if grad is view:
            return True
        assert grad is not None
        if grad.dtype != view.dtype or grad.shape != view.shape:
            raise GradientError(changed(self.names[index], grad, tuple(view.shape), view.dtype))
        view.copy_(grad.to_dense() if grad.is_sparse else grad)
        parameter.grad = view
        self.leftover.discard(index)
        return False

    def _view(self, index: int) -> Tensor:
        """The view into the buffer; a new one where the program gave the last one other memory (`grad.data = ...`)."""
        if self.views[index].data_ptr() != self._addresses[index]:
            self.views[index] = self.view(index, self.flats)
        return self.views[index]

    def _become(self, state: str) -> None:
        """Set the state of the buffers. Local."""
        self.state = state
        self.leftover = set(range(len(self.parameters))) if state == SCATTERED else set()
        if state == SCATTERED:
            self._marks.put()
        self._versions = [version_of(each) for each in self.flats.values()]
        if state == AVERAGED:
            for index in self._of_others:
                self.parameters[index].grad = self._view(index)

    @torch.no_grad()
    def take_edits(self) -> GradientError | None:
        """Copy gradients that the program has replaced since the average into the buffers. Local.

        Returns an error: edits of SCATTERED gradients (clipped by a norm of leftovers, for example), or gradients of
        another shape or dtype.
        """
        if self.state == SCATTERED:
            return GradientError(EDITED) if self._edited() else None
        try:
            for index in self._given():
                self._adopt(index, look=True)
        except GradientError as error:
            return error
        return None

    def _edited(self) -> bool:
        """Whether the program has changed SCATTERED gradients, in place or by replacing them. Local."""
        if self._versions != [version_of(each) for each in self.flats.values()]:
            return True
        return bool(self._given()) or not self._marks.there()

    def _given(self) -> list[int]:
        """The parameters whose .grad is not in the buffers (`p.grad = ...`)."""
        own = zip(self.parameters, self.views, self._addresses, strict=True)
        return [
            index
            for index, (parameter, view, address) in enumerate(own)
            if (grad := parameter.grad) is not None and not _same(grad, view, address)
        ]

    # The end of a step, and of all

    def leaves_out(self) -> bool:
        """Whether all ranks leave out this step, since gradients can't be averaged. Local."""
        return self.check is not None and self.check.left_out

    def forget(self, release: bool) -> None:
        """Begin with new gradients. release: .grad of every parameter becomes None."""
        self.abandon()
        self.state = LOCAL
        if self.rows is self._spent and not self.in_closure:  # not those that are told already for the next average
            self.rows = None
        if release:
            self.leftover = set()
            for parameter in self._all:
                parameter.grad = None

    def stepped(self, release: bool) -> None:
        """The parameters were updated."""
        self.steps, self.rows = self.steps + 1, None
        self.forget(release)

    def report(self, backend: str, update: str) -> Report:
        """What averaging has cost so far, by a backend and for an update. Also after close()."""
        return Report(
            backend=backend,
            update=update,
            overlap=self.during,
            ranks=self.ranks,
            steps=self.steps,
            averages=self.averages,
            communication=self.clock.communication,
            exposed=self.clock.exposed,
            waiting=self.clock.waiting,
            bytes=sum(self.sizes) * self.averages,
            buckets=self.sizes,
        )

    def close(self, why: str | None = CLOSED) -> None:
        """Free the memory (`.grad` becomes None). Local.

        why: the text of the error that backward raises from now on; None where another reducer averages these
            parameters next.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, view in zip(self.parameters, self.views, strict=False):
            if parameter.grad is view:
                parameter.grad = None
        if self._in_charge and why is not None:
            refuse(self._all, why)
        self._in_charge = False
        self._backward = None
        self.device.finish()
        for held in (self.views, self.flats, self.buckets):
            held.clear()
        self._marks.clear()


def _same(grad: Tensor, view: Tensor, address: int) -> bool:
    """Whether a gradient is the view into the buffer, or has the same memory as the view had, at `address`."""
    if grad is not view and (
        grad.is_sparse or (grad.dtype, grad.shape, grad.stride()) != (view.dtype, view.shape, view.stride())
    ):
        return False
    return grad.data_ptr() == address


class Backward:
    """The reduction of the gradients of one backward.

    `arrived` is called for each gradient, `launch` for each bucket, in the same order on every rank, then `finish`; or
    `abandon`, when autograd raised. In any case every bucket is launched, since other ranks wait for it. With the last
    bucket the ranks exchange which parameters they have used and whether there was an error. All of them raise the
    same error, so ranks agree about each backward.
    """

    def __init__(self, reducer: Reducer, what: str) -> None:
        self.reducer, self._what = reducer, what
        dense = len(reducer.parameters)
        self._missing = [{slot.parameter for slot in bucket.slots} for bucket in reducer.plan]
        self._missing += [{dense + number} for number in range(len(reducer.sparse.parameters))]
        self._crossings = [reducer.device.crossing() for _ in self._missing]
        self._launched = 0
        self._error: Exception | None = None
        self.failures = reducer.group.failures
        self._facts = np.zeros(1 + len(reducer.bucket_of), np.uint8)
        self.used = self._facts[1:]  # after the end: for each parameter whether any rank has a gradient of it
        self.unused: list[int] = []  # parameters without a gradient on this rank
        self.futures: list[Future] = []
        self.task = -1  # autograd's number of the backward
        self.met = False  # `meet` has been called
        self._ending: weakref.ref | None = None  # the callback of autograd's end, which autograd holds until then

    def begin(self) -> None:
        """Have autograd call `_ended` at the end of the current backward."""
        self.task = _backward_number()
        ending = partial(self._ended)
        self._ending = weakref.ref(ending)
        _call_when_backward_ends(ending)
        _running.add(self)

    def running(self) -> bool:
        """True while autograd runs. A backward that raises drops the callback without a call."""
        return self._ending is not None and self._ending() is not None

    def arrived(self, index: int) -> None:
        """The gradient of a parameter is complete: launch the buckets that are complete with it."""
        bucket = self.reducer.bucket_of[index]
        missing = self._missing[bucket]
        if index not in missing:
            names = [*self.reducer.names, *self.reducer.sparse.names]
            raise GradientError(
                f"{names[index]} received its gradient twice in one backward, so it may be half "
                "reduced; use torch.utils.checkpoint with use_reentrant=False, or MirroredOptimizer(..., overlap=False)"
            )
        missing.remove(index)
        self._crossings[bucket].note()
        # In the order of the buckets, whatever is ready first: a queue's calls match by their order.
        while self._launched < len(self._missing) and not self._missing[self._launched]:
            self.launch()

    @torch.no_grad()
    def launch(self) -> None:
        """Submit the reduction of the next bucket. Its error is raised later, on all ranks."""
        bucket = self._launched
        self._launched += 1
        try:
            self.unused += self.reducer.prepare(bucket)
        except GradientError as error:
            self._error = self._error or error
        self._crossings[bucket].leave()
        last = self._launched == len(self._missing)
        what = f"{self._what}, bucket {self._launched} of {len(self._missing)}"
        self.futures.append(self.reducer.submit(partial(self._reduce, bucket, last, self.reducer.clock.now()), what))

    def launch_rest(self) -> None:
        """Submit all buckets that were not submitted yet."""
        while self._launched < len(self._missing):
            self.launch()

    def _reduce(self, bucket: int, last: bool, came: float) -> None:
        """Runs in the queue. came: when it was submitted."""
        try:
            self.reducer.clock.came(came)
            with self._crossings[bucket].inside():
                self.reducer.reduce(bucket)
        except Exception as error:  # sent to all ranks with the facts
            self._error = self._error or error
        if last:
            self._exchange_facts()

    def _exchange_facts(self) -> None:
        """Exchange errors and used parameters. Exact, so apart from gradients, which may be compressed."""
        reducer, facts = self.reducer, self._facts
        facts[1:] = 1
        facts[1 + np.array(self.unused, dtype=np.intp)] = 0
        facts[0] = self._error is not None
        if reducer.comm.size > 1:
            with waiting(reducer.comm, "hear what the other ranks' backwards have met"):
                reducer.comm.Allreduce(MPI.IN_PLACE, facts, MPI.MAX)
        if facts[0]:
            reducer.group.failed()
            raise_together(reducer.comm, self._error)
        if reducer.check is not None:
            try:
                reducer.check.finish(reducer.comm, reducer.overflowed, may_leave_out=not reducer.in_closure)
            except NotFiniteError:
                reducer.group.failed()
                raise

    def _ended(self) -> None:
        """Autograd has ended: all optimizers with gradients of this backward submit everything, and only then wait.

        Their order may be another one on another rank, and one that waits delays those after it.
        """
        with self.reducer.guard():
            if not self.met:
                meet([other for other in _running if other.task == self.task])
            self.reducer.finish(self)

    def finish(self) -> None:
        """Launch what is left and wait for everything. Raises the same error on all ranks.

        An interrupt (Ctrl-C) leaves at once; `abandon` waits for the rest then.
        """
        self.launch_rest()
        errors = []
        for future, crossing in zip(self.futures, self._crossings, strict=True):
            try:
                future.wait()
            except Exception as error:
                errors.append(error)
            crossing.back()
        self._ending = None
        _running.discard(self)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """End an average that autograd began before it raised. The ranks that wait for it raise a GradientError."""
        if self._launched < len(self._missing):
            self._error = self._error or GradientError(
                "backward raised after a part of its gradients had been sent to the other ranks, so these averages "
                "mean nothing; the error is this rank's. Let it end the job, or use overlap=False"
            )
        try:
            self.finish()
        except GradientError:  # this rank has had its error already
            return

    def failed(self) -> bool:
        """Whether a reduction has failed."""
        return any(each.done() and each.error is not None for each in self.futures)


_running: weakref.WeakSet[Backward] = weakref.WeakSet()


def meet(backwards: list[Backward]) -> None:
    """Submit all buckets of these optimizers, and of those that average on another rank only. Collective.

    The latter, whose models have no part in this rank's loss, bring zeros. If they waited for their step(), the step of
    another optimizer might wait for ranks that wait for them.
    """
    for backward in backwards:
        backward.launch_rest()
        backward.met = True
    for group in dict.fromkeys(each.reducer.group for each in backwards):
        own = [each for each in backwards if each.reducer.group is group]
        for finish in _late(group, own):
            finish()


def _late(group: OptimizerGroup, own: list[Backward]) -> list[Callable[[], object]]:
    """Begin the averages that other ranks have begun beside `own`; the results finish them. Collective."""
    here = {each.reducer.number for each in own}
    failures = min(each.failures for each in own)
    others = group.taking_part(here, failures, lambda: any(each.failed() for each in own))
    return [each.join_in() for each in others]
