"""Averages gradients: they live in the backend's memory, and are reduced when backward ends, or during it.

A gradient's way: autograd -> the view in the buffer that the backend allocated -> reduced where it is ->
read there by the optimizer. Autograd makes the first gradient of a step in memory of its own, since nobody
can tell it where; a hook moves it into the view, and later ones (accumulation) are added to the view.

When backward returns, `.grad` of every parameter is the average, so what comes before step (clipping) sees that.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn import Parameter

from allreduce.backend import AllReduce
from allreduce.engine.queue import Lane, Pending
from allreduce.transport.control import raise_together
from allreduce.transport.wait import waiting
from trainers.errors import NotFiniteError
from trainers.pytorch.buckets import Marks, allocate, plan
from trainers.pytorch.errors import SECOND, GradientError, changed
from trainers.pytorch.hooks import CLOSED, refuse, take_over
from trainers.pytorch.optimizer_group import Family
from trainers.pytorch.recovery import surviving
from trainers.pytorch.report import Clock
from trainers.pytorch.rows import Rows, result_of, submit
from trainers.pytorch.sparse import SparseGradients
from trainers.pytorch.step_checks import GradientCheck
from trainers.replicas.pytorch.devices import Host
from trainers.replicas.pytorch.tensors import DTYPES, shaped

if TYPE_CHECKING:
    from trainers.pytorch.optimizer_group import Family


EDITED = (
    'gradients were changed between backward and step(), and with update="sharded" a rank has the averages of its own '
    "slice only; call optimizer.synchronize() first (before clipping, before GradScaler.unscale_ or GradScaler.step), "
    "which gathers them"
)


class Backward:
    """The gradients of one backward on their way.

    Its life: `arrived` for each gradient, `launch` for each bucket, in the order of the buckets on every rank,
    then `finish`; or `abandon`, when autograd raised. However it ends, every bucket is launched, since other ranks
    wait for it, and with the last one the ranks tell each other two facts: which parameters they have used, and
    whether something went wrong; then all of them raise the same error. So ranks agree about each backward.
    """

    def __init__(self, averager: "Averager", what: str) -> None:
        self.averager, self._what = averager, what
        self._missing = [{slot.parameter for slot in memory.bucket.slots} for memory in averager.buckets]
        self._missing += averager.sparse.parts()
        self._crossings = [averager.device.crossing() for _ in self._missing]
        self._launched = 0
        self._error: Exception | None = None
        self.failures = averager.family.failures
        self._facts = np.zeros(1 + len(averager.bucket_of), np.uint8)
        self.unused: list[int] = []  # parameters without a gradient on this rank
        self.pending: list[Pending] = []
        self._task = -1  # autograd's number of the backward
        self._met = False  # the optimizers have seen who of them takes part
        self._ending: weakref.ref | None = None  # to what autograd calls when it is through, as long as it will

    def begin(self) -> None:
        """Have autograd call `_ended` when the backward that goes on now is through."""
        self._task = torch._C._current_graph_task_id()
        ending = partial(self._ended)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        _running.add(self)

    def running(self) -> bool:
        """True while autograd is at work. A backward that raises lets go of the callback without a call."""
        return self._ending is not None and self._ending() is not None

    def arrived(self, index: int) -> None:
        """The gradient of a parameter is complete: launch what is complete with it."""
        bucket = self.averager.bucket_of[index]
        missing = self._missing[bucket]
        if index not in missing:
            names = [*self.averager.names, *self.averager.sparse.names]
            raise GradientError(
                f"{names[index]} received its gradient twice in one backward, so it may be half "
                "reduced; use torch.utils.checkpoint with use_reentrant=False, or MirroredOptimizer(..., overlap=False)"
            )
        missing.remove(index)
        self._crossings[bucket].note()
        # In the order of the buckets, whatever is ready first: a lane's calls match by their order.
        while self._launched < len(self._missing) and not self._missing[self._launched]:
            self.launch()

    @torch.no_grad()
    def launch(self) -> None:
        """Submit the reduction of the next bucket. What is wrong with it is raised later, on all ranks."""
        bucket = self._launched
        self._launched += 1
        try:
            self.unused += self.averager.prepare(bucket)
        except GradientError as error:
            self._error = self._error or error
        self._crossings[bucket].leave()
        last = self._launched == len(self._missing)
        what = f"{self._what}, bucket {self._launched} of {len(self._missing)}"
        self.pending.append(submit(self.averager.lane, partial(self._reduce, bucket, last, Clock.now()), what))

    def launch_rest(self) -> None:
        """Submit all that was not submitted yet."""
        while self._launched < len(self._missing):
            self.launch()

    def finish(self) -> None:
        """Launch what is left and wait for everything. Raises the same error on all ranks.

        An interrupt (Ctrl-C) leaves at once; `abandon` waits for the rest then.
        """
        self.launch_rest()
        errors = []
        for pending, crossing in zip(self.pending, self._crossings, strict=True):
            try:
                pending.wait()
            except Exception as error:
                errors.append(error)
            crossing.back()
        self._ending = None
        _running.discard(self)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """End what autograd began before it raised. The ranks that wait for it raise a GradientError."""
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
        """Whether a reduction has failed already."""
        return any(each.done() and each.error is not None for each in self.pending)

    def used(self, index: int) -> bool:
        """Whether any rank has a gradient of a parameter, once this has finished."""
        return bool(self._facts[1 + index])

    def _ended(self) -> None:
        """Autograd is through: all optimizers that it passed submit all that they have, and only then wait.

        On another rank they may be passed in another order, and one that waits holds up what comes after it.
        """
        with surviving(self.averager.family):
            if not self._met:
                meet([other for other in _running if other._task == self._task])
            self.averager.finish(self)

    def _reduce(self, bucket: int, last: bool, came: float) -> None:
        """Runs in the lane, when all ranks have come to it. came: when it was submitted here."""
        try:
            self.averager.clock.came(came)
            with self._crossings[bucket].inside():
                self.averager.reduce(bucket)
        except Exception as error:  # told to all ranks with the facts
            self._error = self._error or error
        if last:
            self._exchange_facts()

    def _exchange_facts(self) -> None:
        """Beside the gradients, never in them: what is lossy or 16 bits wide there stays exact here."""
        comm, facts = self.averager.comm, self._facts
        facts[1:] = 1
        facts[1 + np.array(self.unused, dtype=np.intp)] = 0
        facts[0] = self._error is not None
        if comm.size > 1:
            with waiting(comm, "hear what the other ranks' backwards have met"):
                comm.Allreduce(MPI.IN_PLACE, facts, MPI.MAX)
        if facts[0]:
            self.averager.family.failed()
            raise_together(comm, self._error)
        if (check := self.averager.check) is not None:
            try:
                check.settle(comm, may_leave_out=not self.averager.in_closure)
            except NotFiniteError:
                self.averager.family.failed()
                raise


_running: "weakref.WeakSet[Backward]" = weakref.WeakSet()


def meet(backwards: list[Backward]) -> None:
    """Submit all that these optimizers have, and have those take part here that do so on another rank. Collective.

    An optimizer whose model has no part in this rank's loss counts as zeros; were it to wait for its step(), the
    step of another optimizer might wait for ranks that wait for it.
    """
    for backward in backwards:
        backward.launch_rest()
        backward._met = True
    for family in {id(each.averager.family): each.averager.family for each in backwards}.values():
        own = [each for each in backwards if each.averager.family is family]
        for backward in _late(family, own):
            backward.averager.finish(backward)


def _late(family: "Family", own: list[Backward]) -> list[Backward]:
    """The averages that other ranks have begun beside `own`, begun here as well. Collective."""
    here = {each.averager.number for each in own}
    failures = min(each.failures for each in own)
    others = family.taking_part(here, failures, lambda: any(each.failed() for each in own))
    return [each.join_in() for each in others]


LOCAL, SCATTERED, AVERAGED = "local", "scattered", "averaged"  # what the buffers hold; see Averager.state

ResultT = TypeVar("ResultT")


class Averager:
    """The gradients of some parameters, in buckets of flat buffers, and their reduction.

    parameters: those that are trained, in the order of the model, by name. sparse: those whose gradients stay sparse:
        the last buckets, of one each, and with numbers after the others'; they are averaged whole, never SCATTERED.
    backend: allocates the buffers.
    family: whose newest member this is.
    lane: runs the reductions, in one order on all ranks. comm: used inside of the lane's calls only.
    reduce: what is done with each bucket, a 1-D array, in place; it leaves the averages of the whole bucket
        (`reduces_to` AVERAGED) or of the part that this rank owns (SCATTERED): `owned`, by a bucket's length.
    during: the reductions are submitted while backward goes on. device: where the parameters are.

    state: LOCAL: there may be gradients of this rank that are not averaged yet. SCATTERED: averages in what
        this rank owns of each bucket, leftovers elsewhere. AVERAGED: averages everywhere.
    """

    def __init__(
        self,
        parameters: dict[str, Parameter],
        sparse: SparseGradients,
        backend: AllReduce,
        family: Family,
        lane: Lane,
        comm: MPI.Intracomm,
        *,
        reduce: Callable[[np.ndarray], object],
        reduces_to: str,
        owned: Callable[[int], slice],
        during: bool,
        device: Host,
        bucket_bytes: tuple[float, float],
    ) -> None:
        self.names, self.parameters, self.sparse = list(parameters), list(parameters.values()), sparse
        self.family, self.number, self.lane, self.comm, self.during = family, family.newest, lane, comm, during
        self.ranks = comm.size  # also known after close()
        self._reduce, self._reduces_to, self.owned, self.device = reduce, reduces_to, owned, device
        sizes = [(each.numel(), DTYPES[each.dtype], each.element_size()) for each in self.parameters]
        self.plan, lengths = plan(sizes, *(bucket_bytes if during else (math.inf, math.inf)))
        self.flats, self.buckets = allocate(backend, self.plan, lengths, device)
        self.sizes = tuple(memory.array.nbytes for memory in self.buckets)
        self._slots = {slot.parameter: (at, slot) for at, bucket in enumerate(self.plan) for slot in bucket.slots}
        self.bucket_of = {parameter: at for parameter, (at, _) in self._slots.items()}
        self.bucket_of |= sparse.follow(len(self.parameters), len(self.buckets))
        self._all = [*self.parameters, *sparse.parameters]
        self.views = [self.place(index, self.flats) for index in range(len(self.parameters))]
        self._addresses = [view.data_ptr() for view in self.views]
        self.state = LOCAL
        self._in_charge = False  # of the model's gradients; see take_over
        self.enabled = True  # False inside of no_sync()
        # During a step with a closure, which can't be left out, and keeps its rows: a closure begins with zero_grad().
        self.in_closure = False
        self.check: GradientCheck | None = None  # of NaN, where it is asked for
        self.clock = Clock()
        self.rows: Rows | None = None  # of the batches of this step, where they were told
        self._spent: Rows | None = None  # the rows of the last average
        self.joining = False  # inside of join(): ranks that tell no rows count as one each
        self.steps = self.averages = self._begun = 0
        self.leftover: set[int] = set()  # parameters whose .grad holds the leftovers of a SCATTERED reduction
        self._of_others: list[int] = []  # parameters that other ranks have used, and this one has not
        self._backward: Backward | None = None  # the one under way, or what remains of one that raised
        self.versions: list[int] = []
        self._marks = Marks(self.flats, self.plan, [owned(each.array.size) for each in self.buckets], device)
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, each in enumerate(self._all)
        ]

    def take_over(self, owner: object) -> None:
        """From now on nobody else averages these parameters, and `close` makes backward refuse. Local."""
        take_over(self._all, owner)
        self._in_charge = True

    def place(self, index: int, flats: dict[str, Tensor]) -> Tensor:
        """The place of a parameter in `flats` (by dtype), which are laid out like the gradients: a view."""
        at, slot = self._slots[index]
        return shaped(flats[self.plan[at].dtype], slot.start, self.parameters[index])

    def call(self, what: str) -> str:
        """What this rank is about to do, with all that must be alike on the ranks."""
        return f"{what}, after {self.steps} steps and {self._begun} averages"

    def together(self, what: str, work: Callable[[], ResultT]) -> ResultT:
        """Do `work` when all ranks have come to it, after all that was submitted before. Collective."""
        self.abandon()
        return result_of(self.lane, work, self.call(what), self.device.crossing())

    def count_rows(self, mine: float, active: bool = True) -> Rows:
        """Begin to count the rows of this step. active: False when this rank has no batches left. Collective."""
        self.abandon()
        self.rows = Rows(self.lane, self.comm, mine, self.call("counts rows"), active)
        return self.rows

    def leaves_out(self) -> bool:
        """Whether all ranks leave out the step of the last averages, since gradients were no numbers. Local."""
        return self.check is not None and self.check.left_out

    # Called by autograd

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        """The gradient of a parameter is complete, as far as this backward goes."""
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

    def average(self) -> None:
        """See that nothing is LOCAL any more. Collective: a rank whose backward has done it waits for nobody."""
        self.abandon()
        if self.state == LOCAL:
            backward = self._begin()
            meet([backward])
            self.finish(backward)

    def join_in(self) -> Backward:
        """Take part in an average that other ranks have begun. What this returns is to be finished."""
        self.abandon()
        backward = self._begin()
        backward.launch_rest()
        return backward

    def _begin(self) -> Backward:
        if self.joining and self.rows is None:
            self.count_rows(1)
        self.state = LOCAL
        if self.check is not None:
            self.check.begin()
        self._backward = Backward(self, self.call("averages gradients"))
        self._begun += 1
        return self._backward

    def finish(self, backward: Backward) -> None:
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
        self.clock.add(backward.pending, begin)
        self.averages += 1
        self._spent = self.rows
        self._of_others = [each for each in backward.unused if each < len(self.views) and backward.used(each)]
        self.sparse.hand_over(backward.used)
        self.become(self._reduces_to)

    def abandon(self) -> None:
        """End an average that backward began before it raised, if the other ranks wait for it. Collective only then."""
        backward = self._backward
        if backward is None:
            return
        self._backward = None
        if backward.pending or self.during:
            backward.abandon()
            self.rows = None
        else:
            self._begun -= 1

    def prepare(self, bucket: int) -> list[int]:
        """See that a bucket holds this rank's gradients, zeros for those that it has not; these are returned."""
        if bucket >= len(self.buckets):
            return self.sparse.prepare(bucket)
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
        """Reduce a bucket, weighted by the rows of the ranks where they were told. Runs in the lane."""
        if bucket >= len(self.buckets):
            return self.sparse.average(bucket, self.rows, self.check)
        memory = self.buckets[bucket]
        if self.rows is not None:
            self.rows.weigh(memory.tensor)
        if self.check is not None:
            self.check.look(memory)
        memory.through(self._reduce, writes=self.owned(memory.array.size))

    def _adopt(self, index: int, look: bool = False) -> bool:
        """Make .grad the view into the buffer. True when it was that already.

        look: see whether the view still is where it was; module.double() gives it other memory.
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
            self.views[index] = self.place(index, self.flats)
        return self.views[index]

    def become(self, state: str) -> None:
        """What the buffers hold from now on. Local."""
        self.state = state
        self.leftover = set(range(len(self.parameters))) if state == SCATTERED else set()
        if state == SCATTERED:
            self._marks.put()
        self.versions = [each._version for each in self.flats.values()]
        if state == AVERAGED:
            for index in self._of_others:
                self.parameters[index].grad = self._view(index)

    def edited(self) -> bool:
        """Whether the program has changed gradients since `become`, in place or by giving others. Local."""
        if self.versions != [each._version for each in self.flats.values()]:
            return True
        return bool(self._given()) or (self.state == SCATTERED and not self._marks.there())

    @torch.no_grad()
    def take_given(self) -> None:
        """Copy gradients that the program has given (`p.grad = ...`) to the buffers. Raises GradientError. Local."""
        for index in self._given():
            self._adopt(index, look=True)

    def _given(self) -> list[int]:
        """The parameters whose .grad is not in the buffers."""
        own = zip(self.parameters, self.views, self._addresses, strict=True)
        return [
            index
            for index, (parameter, view, address) in enumerate(own)
            if (grad := parameter.grad) is not None and not _same(grad, view, address)
        ]

    def forget(self, release: bool) -> None:
        """The gradients are used up. release: .grad of every parameter becomes None."""
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

    def let_go(self) -> None:
        """As `close`, for another to average them. Local."""
        self._in_charge = False
        self.close()

    def close(self, why: str = CLOSED) -> None:
        """Let go of the memory (`.grad` becomes None), and refuse backward from now on. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, view in zip(self.parameters, self.views, strict=False):
            if parameter.grad is view:
                parameter.grad = None
        if self._in_charge:
            refuse(self._all, why)
            self._in_charge = False
        self._backward = None
        self.device.finish()
        for held in (self.views, self.flats, self.buckets):
            held.clear()
        self._marks.clear()


def _same(grad: Tensor, view: Tensor, address: int) -> bool:
    """Whether a gradient is the view into the buffer, at its address, or another tensor of the same elements."""
    if grad is not view and (
        grad.is_sparse or (grad.dtype, grad.shape, grad.stride()) != (view.dtype, view.shape, view.stride())
    ):
        return False
    return grad.data_ptr() == address
