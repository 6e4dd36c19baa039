"""One backward of one optimizer: from the first gradient to the averages, on all ranks or on none."""

import weakref
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI

from allreduce.messages.agreement import raise_together, waiting
from allreduce.messages.worker import Pending
from trainers.errors import NotFiniteError
from trainers.pytorch.errors import GradientError
from trainers.pytorch.recovering import surviving
from trainers.pytorch.report import Clock
from trainers.pytorch.submitting import submit

if TYPE_CHECKING:
    from trainers.pytorch.averaging import Averager
    from trainers.pytorch.family import Family


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
