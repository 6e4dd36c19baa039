"""One call of fit: its epochs, its callbacks, and what a rank has to tell the others on the way."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from allreduce.messages.agreement import combine, everywhere, raise_together
from trainers import prefetch
from trainers.data import Batch, Batches
from trainers.leaving_out import left_out
from trainers.saving import Saver
from trainers.watching.callback import Callbacks
from trainers.watching.history import VALIDATION, Epoch, History
from trainers.watching.meter import LOOK_EVERY
from trainers.watching.progress import Progress

if TYPE_CHECKING:
    from trainers.base import Trainer

Validation = Callable[[], dict[str, float]]
FLAGS = ("stop", "save", "failed")  # what travels behind the metrics in every step: on how many ranks it is so


class Begun(NamedTuple):
    """What of an epoch was done before: its steps, the seconds that they took, the values that they gave."""

    step: int = 0
    seconds: float = 0.0
    measured: np.ndarray = np.empty((0, 0))


class Fit:
    """A fit of a trainer.

    A rank that has met an error, in a callback, the data set or the replica, keeps it and brings gradients of zero;
    a flag that travels with the gradients tells the others, and all ranks raise it before any of them updates. In
    the same way `trainer.stop_training` reaches all ranks, after the update. So neither costs a message of its own;
    only where a trainer can't look at the flag before it updates (`tells_errors`), errors have a small agreement.

    How the steps of an epoch are run is the trainer's (`_run_epoch`): `together` is the usual way, in which every rank
    takes every step; another way uses `guarded`, `begin_batch` and `end_batch`, and ends when this rank's part is done.

    Checkpoints are written between two steps of `together`, or after an epoch; the training begins where the newest one
    was, which may be in the middle of an epoch.

    batches: of the training, from which a trainer takes its rank's.
    validate: evaluates the model after an epoch, on all ranks; None for none.
    callbacks: the user's, this rank's own.
    fetches_ahead: whether a thread fetches batches before they are needed.
    saver: of the checkpoints; None for none.
    """

    def __init__(
        self,
        trainer: "Trainer",
        batches: Batches,
        epochs: int,
        *,
        validate: Validation | None,
        callbacks: Sequence[Any],
        fetches_ahead: bool,
        progress: bool,
        stream: TextIO | None,
        saver: Saver | None = None,
    ) -> None:
        self._trainer, self.batches, self._epochs = trainer, batches, epochs
        self._validate, self.fetches_ahead = validate, fetches_ahead
        replica = trainer.replica
        self._meter = trainer._meter(batches)
        self._history = History()
        self._progress = Progress(progress and trainer.rank == 0, batches.steps, epochs, stream)
        self._callbacks: Callbacks | None = None
        self._users = callbacks
        self._collective: list[str] = []  # which of them have to be given on all ranks
        self._look_every = 1 if replica.device == "cpu" else LOOK_EVERY  # looking makes the host wait for a GPU
        self.error: Exception | None = None  # this rank's, until the others have heard of it
        self._stopped = False  # all ranks know that one of them wants to stop
        self._logs: dict[str, Any] = {}
        self._saver = saver
        self._begun = Begun()
        self._asked = False  # all ranks know that it is time for a checkpoint
        self._share = 0.0  # of the batch that this rank has computed
        self._since = 0.0  # when this epoch began here

    @np.errstate(all="ignore")  # the meter tells it better when the loss diverges
    def run(self) -> History:
        """All epochs, or those until a callback stops the training. Collective."""
        self._trainer.stop_training = False
        try:
            first = self._open()
            self.guarded(self._begin)
            self._agree(f"with callbacks that communicate: {', '.join(self._collective) or 'none'}")
            self.guarded(lambda: self._all.train_begin())
            self.guarded(lambda: self._all.load_state({} if self._saver is None else self._saver.watching))
            self._agree("before the first epoch")
            for number in range(first, self._epochs):
                if self._trainer.stop_training:
                    break
                self._epoch(number)
            self.guarded(lambda: self._all.train_end(self._logs))
            if self._saver is not None:
                self.guarded(self._saver.finish)
            self._agree("after the last epoch")
        finally:
            if self._saver is not None:
                self._saver.close()
            self._progress.close()
            if self._callbacks is not None:
                self._callbacks.let_go()
        return self._history

    @property
    def _all(self) -> Callbacks:
        assert self._callbacks is not None
        return self._callbacks

    def _open(self) -> int:
        """The epoch to begin with, after taking on a checkpoint. Collective."""
        found = None if self._saver is None else self._saver.open()
        if found is None:
            return 0
        path, progress, measured = found
        self._history.extend(map(Epoch.of_dict, progress.history))
        self._begun = Begun(progress.step, progress.seconds, measured)
        rest = "" if progress.epoch < self._epochs else f"; {self._epochs} epochs are done already"
        self._progress.say(f"resumed: {path}, {progress}{rest}")
        return progress.epoch

    def _begin(self) -> None:
        watchers = [self._meter, self._history, self._progress, *self._users]
        self._callbacks = Callbacks(watchers, self._trainer, self._epochs, self.batches.steps)
        self._collective = self._callbacks.collective

    def _epoch(self, number: int) -> None:
        """One epoch, its evaluation, and what callbacks make of it."""
        trainer = self._trainer
        trainer._communication.read()  # the rest of an epoch that an error has ended
        begin = self._since = time.perf_counter()
        self.guarded(lambda: self._all.epoch_begin(number))
        if self._begun.step:
            self.guarded(lambda: self._meter.take_up(self._begun.measured))
        rows = self._meter.rows
        trainer._run_epoch(self, number)
        spent = time.perf_counter() - begin, trainer._communication.read()
        seconds, communication = self._agree(f"after the steps of epoch {number + 1}", *spent)
        self._logs = trainer._end_epoch()
        self.guarded(self._meter.look)
        self._logs |= self._meter.means()
        if self._validate is not None:
            self._logs |= {f"{VALIDATION}{name}": value for name, value in self._validate().items()}
        self._logs |= {
            "seconds": seconds + self._begun.seconds,
            "samples_per_second": (self._meter.rows - rows) / seconds,
            "communication_share": communication / seconds,
        }
        self._begun = Begun()
        self.guarded(lambda: self._all.epoch_end(number, self._logs))
        self._agree(f"after epoch {number + 1}")
        if self._saver is not None:
            self._save_after(number)

    def together(self, number: int) -> None:
        """The steps of epoch `number`, each taken by all ranks together."""
        batches = self.batches.epoch(number, self._begun.step)
        with closing(prefetch.ahead(batches) if self.fetches_ahead else batches) as shares:
            self._steps(number, shares)

    def _steps(self, number: int, shares: Iterator[Batch]) -> None:
        last = self.batches.steps - 1
        for step in range(self._begun.step, self.batches.steps):
            self._step(number, step, shares)
            if (step + 1) % self._look_every == 0 or step == last:
                self._look_at_flags()
            self.guarded(partial(self.end_batch, step))
            self._all.between_steps(number, step)
            if self._saver is not None and step < last:
                self._save_between(number, step + 1)
            if self._stopped:
                break

    def _step(self, number: int, step: int, shares: Iterator[Batch]) -> None:
        trainer = self._trainer
        self.guarded(partial(self.begin_batch, step))
        self.guarded(lambda: self._compute(shares))
        if self.error is not None:
            self._share = 0.0
            trainer._compute(None)
        if not trainer.tells_errors:
            raise_together(trainer._comm, self.error)
        wants = self._saver is not None and self._saver.wants()
        flags = float(trainer.stop_training), float(wants), float(self.error is not None)
        if self._all.before_update(number, step):
            trainer.measured = left_out(trainer, self._share, flags, self._meter.last())
        else:
            trainer.measured = trainer._step(flags)

    def _compute(self, shares: Iterator[Batch]) -> None:
        trainer = self._trainer
        with trainer.span("data"):
            batch = self._fetch(shares)
            self._share = batch.share
        with trainer.span("compute"):
            trainer._compute(batch)

    def _look_at_flags(self) -> None:
        stop, save, failed = self._trainer.measured[-len(FLAGS) :].tolist()
        if failed:
            raise_together(self._trainer._comm, self.error)
        self._stopped, self._asked = bool(stop), bool(save)

    def unusable(self, gradients: Any) -> bool:
        """Whether this rank is not to bring these gradients, where steps are not taken together; may raise anything."""
        return self._all.unusable(gradients)

    def _fetch(self, shares: Iterator[Batch]) -> Batch:
        return self.checked(next(shares))

    def checked(self, batch: Batch) -> Batch:
        """A batch that the replica can be fed with; raises ArgumentError."""
        if not self.batches.checked:
            self._trainer.replica.check_batch(batch.x, batch.y)
        return batch

    def begin_batch(self, step: int) -> None:
        """Tell the callbacks; they may raise anything, and so may the writing of a checkpoint have."""
        if self._saver is not None:
            self._saver.check()
        self._all.batch_begin(step)

    def end_batch(self, step: int) -> None:
        """Tell the callbacks, with the trainer's `measured`; they may raise anything."""
        names, logs = self._trainer.replica.metrics, {}
        if self._all.read_batches:
            logs = dict(zip(names, self._trainer.measured[: len(names)].tolist(), strict=True))
        self._all.batch_end(step, logs)

    def _save_between(self, number: int, step: int) -> None:
        """Write a checkpoint before `step` of an epoch, when it is time or the training stops here. Collective."""
        assert self._saver is not None
        asked, self._asked = self._asked, False
        if self._stopped or self._saver.due(number * self.batches.steps + step, asked):
            self._meter.look()
            seconds = self._begun.seconds + time.perf_counter() - self._since
            progress = self._saver.progress(self._history, number, step, seconds)
            self._saver.save(progress, self._all, self._meter.values())

    def _save_after(self, number: int) -> None:
        """Write a checkpoint after an epoch, when it is time, the best, or the last. Collective."""
        saver = self._saver
        assert saver is not None
        if self._trainer.cut_short or (self._stopped and self._meter.rows < self.batches.rows):
            return  # it stopped in the middle, where it was written, or where nothing can be gone on from
        best = saver.is_best(self._history)
        last = number + 1 == self._epochs or self._trainer.stop_training
        if saver.due_after(number + 1) or best or last:
            saver.save(saver.progress(self._history, number + 1), self._all, np.empty((0, 0)), best)

    def guarded(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None when it fails or this rank has failed before: the error is kept."""
        if self.error is not None:
            return None
        try:
            return action()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            if everywhere(error, self._trainer._comm):
                raise
            self.error = error
            return None

    def _agree(self, where: str, *times: float) -> list[float]:
        """Raise on all ranks an error that no step has carried, hear of a stop; the ranks' mean times. Collective."""
        trainer = self._trainer
        trainer._agree(f"fit, {where}", self.error)
        sums = np.array([trainer.stop_training or self._stopped, *times], np.float64)
        combine(trainer._comm, sums, f"fit, {where}")
        trainer.stop_training = bool(sums[0])
        return (sums[1:] / trainer.size).tolist()
