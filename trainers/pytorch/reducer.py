"""Averages gradients: they live in the backend's memory, and are reduced when backward ends, or during it.

The path of a gradient: autograd -> a view of the backend's buffer -> reduced in place -> read there by the optimizer.
Autograd allocates the first gradient of a step itself; a hook copies it into the view. Later gradients (accumulation)
are added to the view directly.

When backward returns, `.grad` of every parameter is the average, so that clipping before step() uses the average.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from time import perf_counter_ns as now
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce.arrays import dtypes
from allreduce.arrays.parts import Part
from allreduce.backend import AllReduce
from allreduce.call.queue import Future, Queue
from allreduce.tracing.recorder import Recorder
from allreduce.transport import ulfm
from allreduce.transport.control import everywhere, raise_together
from trainers.checks import GradientCheck, SameData
from trainers.options.buckets import plan_buckets
from trainers.pytorch.buckets import (
    DenseBucket,
    Gradient,
    GradientError,
    Marks,
    allocate_flat,
    spans_of,
)
from trainers.pytorch.hooks import CLOSED, refuse, take_over
from trainers.pytorch.optimizer_group import OptimizerGroup
from trainers.pytorch.options import Options
from trainers.pytorch.rows import Rows, combined
from trainers.pytorch.sparse import SparseBucket
from trainers.replicas.pytorch import devices
from trainers.replicas.pytorch.tensors import DTYPES, version_of
from trainers.state.dealing import Share, shares_of
from trainers.state.sharded import Flat
from trainers.strategies.overlap import TWICE, Submissions

LOCAL, SCATTERED, AVERAGED = "local", "scattered", "averaged"  # the contents of the buffers; see Reducer.state

EDITED = (
    'gradients were changed between backward and step(), and with update="sharded" a rank has the averages of its own '
    "slice only; call optimizer.synchronize() first (before clipping, before GradScaler.unscale_ or GradScaler.step), "
    "which gathers them"
)
# FullyShardedDataParallel calls these functions of autograd too; PyTorch has no public names for them.
_backward_number: Callable[[], int] = attrgetter("_C._current_graph_task_id")(torch)
_call_when_backward_ends = attrgetter("_execution_engine.queue_callback")(torch.autograd.Variable)

ResultT = TypeVar("ResultT")


class Clock:
    """Notes spans of a MirroredOptimizer in its trace; without a trace it does nothing.

    All time outside of spans is "compute": data, forward, backward, clipping.
    recorder: records the calls of the backend that reduces the buckets; None without a trace.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._since = now()  # the end of the last span
        self._thread = threading.get_ident()
        self._first: int | None = None  # when this thread submitted the first bucket that it reduces itself

    def submitted(self, at: int) -> None:
        """Record when the queue's next reduction was submitted. Called by the thread that runs the queue."""
        if self._recorder is not None:
            self._recorder.came(at)
            if self._first is None and threading.get_ident() == self._thread:
                self._first = at

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Note the time in the block, if it ends without an error.

        kind: "update"; "wait" for other ranks; or "reduce": this rank only waits for the calls of the backend.
        """
        begin = now()
        yield
        if self._recorder is None:
            return
        computed = begin if self._first is None else self._first
        if computed > self._since:
            self._recorder.trace.note("compute", self._since, computed)
        if kind == "reduce":
            self._recorder.waited(begin)
        else:
            self._recorder.trace.note(kind, begin)
        self._since, self._first = now(), None


class Reducer:
    """The gradients of some parameters, in buckets of flat buffers, and their reduction.

    trained: the parameters by name, in the order of the model. sparse: the ids of those with sparse gradients: each has
        a bucket of its own, after the dense ones, and all ranks get its averages.
    options: of the MirroredOptimizer. backend: allocates the buffers and reduces them. comm: used in the queue only.
    queue: runs the reductions, in one order on all ranks. during: whether it does so during backward.
    group, number: the optimizers on these ranks, and the number of this one. clock: records this rank's time.
    tensors: with update="sharded", whether a rank updates whole tensors, not slices.

    state: LOCAL: this rank's gradients may not be averaged yet. SCATTERED: dense averages in `bucket.share.parts`,
        meaningless values elsewhere. AVERAGED: averages everywhere.
    """

    def __init__(
        self,
        trained: dict[str, Parameter],
        sparse: set[int],
        options: Options,
        backend: AllReduce,
        comm: MPI.Intracomm,
        queue: Queue,
        during: bool,
        group: OptimizerGroup,
        number: int,
        tensors: bool,
        clock: Clock,
    ) -> None:
        self.trained, self.options, self.backend, self.tensors, self.clock = trained, options, backend, tensors, clock
        self._queue, self.during, self.comm, self.group, self.number = queue, during, comm, group, number
        self.device, self._same_data = devices.device_of(trained.values()), SameData(backend)
        averaged = {} if options.local else trained
        dense = [(name, each) for name, each in averaged.items() if id(each) not in sparse]
        rows = [(name, each) for name, each in averaged.items() if id(each) in sparse]
        self.parameters = [each for _, each in dense]
        scatter = options.sharded is not None and bool(dense)
        limits = options.buckets.limits if during else (math.inf, math.inf)
        sizes = [(each.numel(), DTYPES[each.dtype], each.element_size()) for each in self.parameters]
        self.plan, lengths = plan_buckets(sizes, *limits)
        memories = {dtype: allocate_flat(backend, length, dtype, self.device) for dtype, length in lengths.items()}
        self.flats = {dtype: memory.tensor for dtype, memory in memories.items()}
        self._describe(backend, memories, dense)
        slots = {slot.parameter: (layout.dtype, slot.start) for layout in self.plan for slot in layout.slots}
        self.gradients = [Gradient(*named, self.flats, *slots[index]) for index, named in enumerate(dense)]
        shares = self._shares() if scatter else [None for _ in self.plan]
        parts = [
            (each, memories[each.dtype].part(each.start, each.stop), self.gradients, backend, share)
            for each, share in zip(self.plan, shares, strict=True)
        ]
        self.dense = [DenseBucket(*part) for part in parts]
        self.sparse = [SparseBucket(index, *named, backend) for index, named in enumerate(rows, len(dense))]
        self.buckets: list[DenseBucket | SparseBucket] = [*self.dense, *self.sparse]
        self._reduces_to = SCATTERED if scatter else AVERAGED
        self.names = [name for name, _ in dense + rows]
        self.state = LOCAL
        self._owns_gradients = False  # see take_over
        self.enabled = True  # False inside of no_sync()
        # True during a step with a closure. Such a step can't be left out, and its zero_grad() must not reset the rows.
        self.in_closure = False
        self.check: GradientCheck | None = None
        if options.on_bad is not None and self.buckets:
            self.check = GradientCheck(options.on_bad, [bucket.gradient_array() for bucket in self.buckets])
        self.rows: Rows | None = None  # the rows of this step's batches, if rows() was called
        self._last_rows: Rows | None = None  # the rows of the last average
        self.rates: Callable[[], str] = str  # returns the learning rates of this rank
        self.joining = False  # inside of join(); a rank that does not call rows() counts as one row
        self.steps = self._begun = 0
        self._used_by_others: dict[Gradient, None] = {}  # of parameters that other ranks alone have used
        self._backward: Backward | None = None  # the current backward, or one that raised
        self._versions: list[int] = []  # of the buffers when they got their state
        self._marks = Marks(self.flats, self.plan, [bucket.share.parts for bucket in self.dense], self.device)
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, (_, each) in enumerate(dense + rows)
        ]

    def _describe(
        self, backend: AllReduce, memories: Mapping[str, Flat], dense: Sequence[tuple[str, Parameter]]
    ) -> None:
        """Tell the backend which parameters are where. memories: by dtype. Local."""
        for dtype, memory in memories.items():
            slots = [slot for layout in self.plan if layout.dtype == dtype for slot in layout.slots]
            named = [(*dense[slot.parameter], slot.start) for slot in slots]
            parts = [Part(name, start, tuple(each.shape)) for name, each, start in named]
            backend.describe(memory.array, parts)

    def _shares(self) -> Sequence[Share]:
        """Return the part of each bucket that this rank updates: its chunk, or whole tensors. Collective."""
        lengths = [bucket.stop - bucket.start for bucket in self.plan]
        itemsizes = [dtypes.parse(bucket.dtype).itemsize for bucket in self.plan]
        whole = list(map(spans_of, self.plan)) if self.tensors else None
        return shares_of(self.backend, self.comm, lengths, whole, itemsizes)

    def take_over(self, owner: object) -> None:
        """Become the owner of these parameters; after `close`, backward through them raises. Local."""
        take_over(self.trained.values(), owner)
        self._owns_gradients = True

    # From a gradient to its average: hook, backward, bucket

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        """Autograd hook: the gradient of a parameter is complete in this backward."""
        backward = self._backward
        running = backward is not None and backward.running()
        if not running:
            self.abandon()
        if index < len(self.gradients):
            self.gradients[index].adopt()
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

    def reduce(self, number: int) -> None:
        """Reduce a bucket, weighted by the ranks' rows if rows() was called. Runs in the queue."""
        bucket = self.buckets[number]
        if number == 0 and isinstance(bucket, DenseBucket):
            self._same_data.compare(bucket.memory.fetched())
        bucket.weigh(1.0 if self.rows is None else self.rows.weight)
        if self.check is not None:
            bucket.check(self.check, number)
        bucket.reduce()

    def finish(self, backward: "Backward") -> None:
        """Reduce the remaining buckets, wait for all, and set .grad to the averages. Collective."""
        try:
            with self.clock.span("reduce"):
                backward.finish()
                if self.rows is not None:
                    self.rows.wait()
        except Exception:  # not KeyboardInterrupt: the submitted reductions continue then
            self._backward = self.rows = None  # the rows belong to the failed gradients
            raise
        self._backward = None
        self._last_rows = self.rows
        dense = len(self.gradients)
        others = (self.gradients[each] for each in backward.unused if each < dense and backward.used[each])
        self._used_by_others = dict.fromkeys(others)
        for bucket in self.sparse:
            bucket.hand_over(used=bool(backward.used[bucket.parameters[0]]))
        self._become(self._reduces_to)

    def average(self) -> None:
        """Average the gradients unless a backward has done so. Collective."""
        self.abandon()
        if self.state == LOCAL:
            backward = self._begin()
            launch_all([backward])
            self.finish(backward)

    def gather(self) -> None:
        """Go from SCATTERED to AVERAGED. Runs in the queue."""
        for bucket in self.dense:
            assert bucket.gather is not None
            bucket.gather()
        self._become(AVERAGED)

    def start_average(self) -> Callable[[], None]:
        """Start the average that other ranks have begun; returns a function that finishes it. Collective."""
        self.abandon()
        backward = self._begin()
        backward.launch(rest=True)
        return partial(self.finish, backward)

    def abandon(self) -> None:
        """Finish the average of a backward that has failed, if other ranks wait for it. Collective in that case."""
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

    def _call(self, name: str) -> str:
        """Return the text of a call with the counts that must be equal on all ranks."""
        return f"{name}, after {self.steps} steps and {self._begun} averages"

    def submit(self, work: Callable[[], object], call: str) -> Future:
        """Submit `work` to the queue. Local.

        If a rank has failed, waiting for the future raises the error: a recovery can't run while autograd does.
        """
        try:
            return self._queue.submit(work, call)
        except Exception as error:
            if ulfm.lost(error) is None:
                raise
            future = Future()
            future.finish(error)
            return future

    def run_in_queue(self, name: str, work: Callable[[], ResultT], reads: bool = False) -> ResultT:
        """Run `work` in the queue on all ranks, and return its result. Collective.

        reads: it reads the averages, so take the edits of them first; all ranks raise the error of any rank.
        """
        error = self.take_edits() if reads else None
        self.abandon()
        results: list[ResultT] = []
        crossing = self.device.crossing()

        def inside() -> None:
            with crossing.running():
                if reads:
                    raise_together(self.comm, error)
                results.append(work())

        crossing.submitted()
        try:
            self._queue.submit(inside, self._call(name), waits=True).wait()
        finally:
            crossing.wait_on_stream()
        return results[0]

    def count_rows(self, mine: float, active: bool = True) -> Rows:
        """Begin to count the rows of this step. active: False when this rank has no batches left. Collective."""
        self.abandon()
        submit = partial(self.submit, call=self._call("counts rows"))
        self.rows = Rows(submit, self.comm, mine, active, self.rates())
        return self.rows

    # .grad and the buffers

    def _become(self, state: str) -> None:
        """Set the state of the buffers. Local."""
        self.state = state
        for gradient in self.gradients:
            gradient.leftover = state == SCATTERED
        if state == SCATTERED:
            self._marks.put()
        self._versions = [version_of(each) for each in self.flats.values()]
        if state == AVERAGED:
            for gradient in self._used_by_others:
                gradient.parameter.grad = gradient.current_view()

    @torch.no_grad()
    def take_edits(self) -> GradientError | None:
        """Copy gradients that the program has replaced since the average into the buffers. Local.

        Returns an error: edits of SCATTERED gradients (clipped by a norm of leftovers, for example), or gradients of
        another shape or dtype.
        """
        if self.state == SCATTERED:
            return GradientError(EDITED) if self._edited() else None
        try:
            for gradient in self._replaced():
                gradient.adopt(check_memory=True)
        except GradientError as error:
            return error
        return None

    def _edited(self) -> bool:
        """Whether the program has changed SCATTERED gradients, in place or by replacing them. Local."""
        if self._versions != [version_of(each) for each in self.flats.values()]:
            return True
        return bool(self._replaced()) or not self._marks.unchanged()

    def _replaced(self) -> list[Gradient]:
        """The gradients that the program has replaced by tensors outside of the buffers (`p.grad = ...`)."""
        return [gradient for gradient in self.gradients if gradient.replaced()]

    def averaged(self, number: int) -> bool:
        """Whether a step changes a dense parameter: it has a gradient here, or on another rank. Local."""
        gradient = self.gradients[number]
        return gradient.parameter.grad is not None or gradient in self._used_by_others

    # The end of a step, and closing

    def leaves_out(self) -> bool:
        """Whether all ranks leave out this step, because its gradients can't be averaged. Local."""
        return self.check is not None and self.check.left_out

    def forget(self, release: bool) -> None:
        """Drop the current gradients. release: also set .grad of every parameter to None."""
        self.abandon()
        self.state = LOCAL
        for gradient in self.gradients:
            gradient.leftover = False
        if self.rows is self._last_rows and not self.in_closure:  # keep rows that were set for the next average
            self.rows = None
        if release:
            for parameter in self.trained.values():
                parameter.grad = None

    def end_step(self, release: bool) -> None:
        """Count a step and drop its gradients and rows. Collective only if `abandon` is."""
        self.steps, self.rows = self.steps + 1, None
        self.forget(release)

    def close(self, why: str | None = CLOSED) -> None:
        """Free the memory (`.grad` becomes None). Local.

        why: the text of the error that backward raises from now on; None where another reducer averages these
            parameters next.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for gradient in self.gradients:
            gradient.release()
        if self._owns_gradients and why is not None:
            refuse(self.trained.values(), why)
        self._owns_gradients = False
        self._backward = None
        self.device.finish()
        for held in (self.gradients, self.flats, self.dense, self.sparse, self.buckets):
            held.clear()
        self._marks.clear()


class Backward(Submissions):
    """The reduction of the gradients of one backward pass.

    `arrived` is called for each gradient, then `finish`; or `abandon`, when autograd raised. In any case every bucket
    is submitted, since other ranks wait for it. With the last one the ranks exchange errors and the parameters that
    they have used, so a backward fails on all ranks or on none.
    """

    def __init__(self, reducer: Reducer, call: str) -> None:
        super().__init__(bucket.parameters for bucket in reducer.buckets)
        self.reducer, self._call = reducer, call
        self._crossings = [reducer.device.crossing() for _ in reducer.buckets]
        self._error: Exception | None = None
        self.failures = reducer.group.failures
        self._flags = np.zeros(1 + len(self.bucket_of), np.uint8)
        self.used = self._flags[1:]  # after `_exchange_flags`: for each parameter, whether any rank has a gradient
        self.unused: list[int] = []  # parameters without a gradient on this rank
        self.task = -1  # autograd's number of this backward pass
        self.launched_all = False  # `launch_all` has been called
        self._ending: weakref.ref | None = None  # the callback at the end of autograd, which only autograd keeps alive

    def begin(self) -> None:
        """Have autograd call `_ended` at the end of the current backward."""
        self.task = _backward_number()
        ending = partial(self._ended)
        self._ending = weakref.ref(ending)
        _call_when_backward_ends(ending)
        _running.add(self)

    def running(self) -> bool:
        """True while autograd runs. If backward raises, autograd drops the callback without calling it."""
        return self._ending is not None and self._ending() is not None

    def arrived(self, parameter: int) -> bool:
        self._crossings[self.bucket_of[parameter]].mark_writer()
        if super().arrived(parameter):
            return True
        raise GradientError(TWICE.format(self.reducer.names[parameter]))

    @torch.no_grad()
    def submit(self, bucket: int) -> Future:
        """Submit the reduction of a bucket. Its error is raised later, on all ranks."""
        try:
            self.unused += self.reducer.buckets[bucket].prepare()
        except GradientError as error:
            self._error = self._error or error
        self._crossings[bucket].submitted()
        count = len(self._crossings)
        last = bucket + 1 == count
        call = f"{self._call}, bucket {bucket + 1} of {count}"
        return self.reducer.submit(partial(self._reduce, bucket, last, now()), call)

    def _reduce(self, bucket: int, last: bool, submitted: int) -> None:
        """Reduce a bucket; after the last one, exchange the flags. Runs in the queue. submitted: time of `submit`."""
        try:
            self.reducer.clock.submitted(submitted)
            with self._crossings[bucket].running():
                self.reducer.reduce(bucket)
        except Exception as error:  # sent to all ranks with the flags
            self._error = self._error or error
        if last:
            self._exchange_flags()

    def _exchange_flags(self) -> None:
        """Exchange errors and used parameters, apart from the gradients, which may be compressed. Collective."""
        reducer, comm = self.reducer, self.reducer.comm
        self.used[:] = 1
        self.used[self.unused] = 0
        try:
            combined(comm, self._flags, self._error, "exchange errors and used parameters of backward")
            if reducer.check is not None:
                overflowed = lambda number: reducer.buckets[number].overflowed(comm)  # noqa: E731
                reducer.check.finish(comm, overflowed, may_leave_out=not reducer.in_closure)
        except Exception as error:
            if everywhere(error, comm):
                reducer.group.failed()
            raise

    def _ended(self) -> None:
        """Called when autograd ends: all optimizers of this backward submit all buckets before any of them waits.

        The order of the optimizers may differ between ranks; waiting in the first would delay the others.
        """
        with self.reducer.group.surviving():
            if not self.launched_all:
                launch_all([other for other in _running if other.task == self.task])
            self.reducer.finish(self)

    def finished(self) -> None:
        for crossing in self._crossings:
            crossing.wait_on_stream()
        self._ending = None
        _running.discard(self)

    def abandon(self) -> None:
        """End an average that autograd began before it raised. The ranks that wait for it raise a GradientError."""
        if not self.ended:
            self._error = self._error or GradientError(
                "backward raised on this rank after some of its gradients had been sent to the other ranks, so these "
                "averages are invalid. Let the error end the job, or use Buckets(overlap=False)"
            )
        try:
            self.finish()
        except GradientError:  # this rank has had its error already
            return

    def failed(self) -> bool:
        """Whether a reduction has failed."""
        return any(each.done() and each.error is not None for each in self.futures)


_running: weakref.WeakSet[Backward] = weakref.WeakSet()


def launch_all(backwards: list[Backward]) -> None:
    """Submit all buckets of these optimizers, and take part in averages that only other ranks have begun. Collective.

    The optimizers of those averages have no gradients on this rank and contribute zeros. If they waited until their own
    step(), ranks could wait for each other in different optimizers.
    """
    for backward in backwards:
        backward.launch(rest=True)
        backward.launched_all = True
    for group in dict.fromkeys(each.reducer.group for each in backwards):
        own = [each for each in backwards if each.reducer.group is group]
        for finish in _start_missing(group, own):
            finish()


def _start_missing(group: OptimizerGroup, own: list[Backward]) -> list[Callable[[], object]]:
    """Start the averages that only other ranks have begun; returns functions that finish them. Collective."""
    here = {each.reducer.number for each in own}
    failures = min(each.failures for each in own)
    others = group.members_averaging_elsewhere(here, failures, lambda: any(each.failed() for each in own))
    return [each.reducer.start_average() for each in others]
