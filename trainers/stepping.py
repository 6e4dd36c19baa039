"""The steps of a fit that ranks take together, and what a rank has to tell the others on the way."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allreduce.transport import ulfm
from allreduce.transport.control import combine, everywhere, raise_together
from trainers import prefetch
from trainers.data import Batch, Batches
from trainers.leaving_out import left_out
from trainers.replica import Replica
from trainers.saving import Saver
from trainers.watching.callback import Callbacks
from trainers.watching.meter import LOOK_EVERY

if TYPE_CHECKING:
    from trainers.base import Trainer

FLAGS = ("left_out", "stop", "save", "failed")  # behind the metrics of every step: on how many ranks it is so


class Place(NamedTuple):
    """How far a fit is: `step` steps of an epoch are done, and of what follows them the parts before `stage`.

    epoch: -1 before the training has begun; the number of epochs when it ends.
    """

    epoch: int = -1
    step: int = 0
    stage: int = 0


STEPS, EVALUATION, EVENTS, SAVE = range(4)  # the stages of an epoch


class Steps:
    """The part of a fit that takes steps.

    A rank that has met an error, in a callback, the data set or the replica, keeps it and brings gradients of zero;
    a flag that travels with the gradients tells the others, and all ranks raise it before any of them updates. In
    the same way `trainer.stop_training` reaches all ranks, after the update. So neither costs a message of its own;
    only where a trainer can't look at the flag before it updates (`tells_errors`), errors have a small agreement.

    How the steps of an epoch are run is the trainer's (`_run_epoch`): `together` is the usual way, in which every rank
    takes every step; another way uses `guarded`, `begin_batch` and `end_batch`, and ends when this rank's part is done.
    """

    def __init__(self, trainer: "Trainer", batches: Batches, fetches_ahead: bool, saver: Saver | None) -> None:
        self.trainer, self.batches, self.fetches_ahead, self.saver = trainer, batches, fetches_ahead, saver
        self.meter = trainer._meter(batches)
        self.callbacks = Callbacks(())
        self.place, self.taken = Place(), trainer.steps  # how far it is, and so many steps the trainer has taken there
        self.error: Exception | None = None  # this rank's, until the others have heard of it
        self.stopped = False  # all ranks know that one of them wants to stop
        self.asks = False  # whether a callback of any rank may leave out a step on its own decision
        self._asked = False  # all ranks know that it is time for a checkpoint
        self._share = 0.0  # of the batch that this rank has computed
        on_gpu = trainer.replica.device != "cpu"
        self._look_every = LOOK_EVERY if on_gpu else 1  # looking makes the host wait for a GPU

    def together(self, number: int) -> None:
        """The steps of epoch `number`, each taken by all ranks together."""
        batches = self.batches.epoch(number, self.place.step)
        with closing(prefetch.ahead(batches) if self.fetches_ahead else batches) as shares:
            self._steps(number, shares)

    def _steps(self, number: int, shares: Iterator[Batch]) -> None:
        steps = self.batches.steps
        if self.stopped and self.saver is not None and 0 < self.place.step < steps:
            self._save_between(number, self.place.step)  # where a lost rank has kept it from being written
        while self.place.step < steps and not self.stopped:
            step = self.place.step
            self._step(number, step, shares)
            self.end_step()
            self.callbacks.between_steps(number, step)
            if self.saver is not None and self.place.step < steps:
                self._save_between(number, self.place.step)

    def end_step(self) -> None:
        """The next step is taken, and `trainer.measured` is of it: tell the callbacks."""
        number, step, _ = self.place
        self.place, self.taken = Place(number, step + 1), self.taken + 1
        self.guarded(partial(self.end_batch, step))

    def _step(self, number: int, step: int, shares: Iterator[Batch]) -> None:
        trainer = self.trainer
        self.guarded(partial(self.begin_batch, step))
        self.guarded(lambda: self._compute(shares))
        if self.error is not None:
            self._share = 0.0
            trainer._compute(None)
        if not trainer.tells_errors:
            with trainer.span("agree"):
                raise_together(trainer._comm, self.error)
        wants = self.saver is not None and self.saver.wants()
        leaves_out = self._leaves_out(number, step)
        flags = float(leaves_out), float(trainer.stop_training), float(wants), float(self.error is not None)
        if leaves_out:
            trainer.replica.undo()
            trainer.measured = left_out(trainer, self._share, flags, self.meter.last())
        else:
            trainer.measured = trainer._step(flags)
        if (step + 1) % self._look_every == 0 or step + 1 == self.batches.steps:
            self.hear_flags()
        trainer.note_step()

    def _leaves_out(self, number: int, step: int) -> bool:
        """Whether all ranks leave this step out: a callback of at least one rank asks for it. Collective.

        Costs one small message, and nothing when all callbacks with a before_update are `agrees`.
        """
        if not self.asks:
            return self.callbacks.before_update(number, step)
        own, trainer = False, self.trainer
        try:
            own = self.callbacks.before_update(number, step)
        except Exception as error:
            if everywhere(error, trainer._comm) or ulfm.lost(error) is not None:
                raise
            self.error = self.error or error
        wanted = np.array([own, self.error is not None], np.int64)
        combine(trainer._comm, wanted, "hear whether a rank leaves a step out")
        if wanted[1]:
            raise_together(trainer._comm, self.error)
        return bool(wanted[0])

    def _compute(self, shares: Iterator[Batch]) -> None:
        trainer = self.trainer
        with trainer.span("data"):
            batch = self._fetch(shares)
            self._share = batch.share
        with trainer.span("compute"):
            trainer._compute(batch)

    def hear_flags(self) -> None:
        """What the ranks have told each other in the last step; what has failed is raised on all of them."""
        _, stop, save, failed = self.trainer.measured[-len(FLAGS) :].tolist()
        if failed:
            raise_together(self.trainer._comm, self.error)
        self.stopped, self._asked = bool(stop), bool(save)

    def unusable(self, gradients: Any, replica: Replica) -> bool:
        """Whether this rank is not to bring these gradients, where steps are not taken together; may raise anything.

        replica: what has computed them, and undoes then what else the batch has changed.
        """
        unusable = self.callbacks.unusable(gradients)
        if unusable:
            replica.undo()
        return unusable

    def _fetch(self, shares: Iterator[Batch]) -> Batch:
        return self.checked(next(shares))

    def checked(self, batch: Batch) -> Batch:
        """A batch that the replica can be fed with; raises ArgumentError."""
        if not self.batches.checked:
            self.trainer.replica.check_batch(batch.x, batch.y)
        return batch

    def begin_batch(self, step: int) -> None:
        """Tell the callbacks; they may raise anything, and so may the writing of a checkpoint have."""
        if self.saver is not None:
            self.saver.check()
        self.callbacks.batch_begin(step)

    def end_batch(self, step: int) -> None:
        """Tell the callbacks, with the trainer's `measured`; they may raise anything."""
        names, logs = self.trainer.replica.metrics, {}
        if self.callbacks.read_batches:
            logs = dict(zip(names, self.trainer.measured[: len(names)].tolist(), strict=True))
        self.callbacks.batch_end(step, logs)

    def _save_between(self, number: int, step: int) -> None:
        """Write a checkpoint before `step` of an epoch, when it is time or the training stops here. Collective."""
        raise NotImplementedError

    def guarded(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None when it fails or this rank has failed before: the error is kept."""
        if self.error is not None:
            return None
        try:
            return action()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            if everywhere(error, self.trainer._comm) or ulfm.lost(error) is not None:
                raise
            self.error = error
            return None

    def _agree(self, where: str, *times: float) -> list[float]:
        """Raise on all ranks an error that no step has carried, hear of a stop; the ranks' mean times. Collective."""
        trainer = self.trainer
        trainer._agree(f"fit, {where}", self.error)
        sums = np.array([trainer.stop_training or self.stopped, *times], np.float64)
        combine(trainer._comm, sums, f"fit, {where}")
        trainer.stop_training = bool(sums[0])
        return (sums[1:] / trainer.size).tolist()
