"""The loop of a fit: its steps and epochs, and the position from which it goes on when a rank fails."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TextIO

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.transport.control import combine, raise_together
from allreduce.transport.wait import wait_for
from trainers.data import Batch, Batches
from trainers.files.checkpoint import Progress as Checkpointed
from trainers.fit import prefetch
from trainers.fit.checkpointing import Saver
from trainers.replica import Replica
from trainers.strategies.interface import FLAGS, Strategy
from trainers.watching.callback import Callbacks
from trainers.watching.history import VALIDATION, Epoch, History
from trainers.watching.meter import LOOK_EVERY
from trainers.watching.progress import Progress

log = logging.getLogger("trainers")

APART = "ranks do not take its steps together, so nobody could go on from it; the one before stays"
Validation = Callable[[], dict[str, float]]


def left_out(strategy: Strategy, share: float, flags: tuple[float, ...], last: np.ndarray) -> Any:
    """As `strategy.step(flags)`, without an update. Collective.

    share: this rank's of the batch, by which its metrics are weighted already. Ranks whose loss is no number do not
    count; last: the metrics of a step before, which stand in where no rank has one.
    """
    metrics = len(strategy.replica.metrics)
    measured = strategy.fresh_measured
    own = (measured.get() if gpu.is_gpu_array(measured) else measured)[:metrics].astype(np.float64)
    sums = np.zeros(metrics + 1 + len(flags))
    if np.isfinite(own).all():
        sums[: metrics + 1] = [*own, share]
    sums[metrics + 1 :] = flags
    wait_for(strategy.group.comm, strategy.group.comm.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), "leave a step out")
    means = sums[:metrics] / sums[metrics] if sums[metrics] else last
    result = np.concatenate([means, sums[metrics + 1 :]]).astype(measured.dtype)
    return gpu.cupy().asarray(result) if gpu.is_gpu_array(measured) else result


class PartialEpoch(NamedTuple):
    """What is done of an epoch: its steps, the seconds that they took, the values that they gave.

    rows: that a checkpoint had, when other ranks have trained since, whom this one joins.
    """

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    measured: np.ndarray = np.empty((0, 0))
    rows: int | None = None


class Position(NamedTuple):
    """How far a fit is: `step` steps of an epoch are done, and of what follows them the parts before `part`.

    epoch: -1 before the training has begun; the number of epochs when it ends.
    """

    epoch: int = -1
    step: int = 0
    part: int = 0


STEPS, EVALUATION, EVENTS, SAVE = range(4)  # the parts of an epoch


class Fit:
    """A fit of a strategy on the ranks of its group.

    A rank that has met an error, in a callback, the data set or the replica, keeps it and brings gradients of zero;
    a flag that travels with the gradients tells the others, and all ranks raise it before any of them updates. In
    the same way `strategy.stop_training` reaches all ranks, after the update. So neither costs a message of its own;
    only where a strategy can't look at the flag before it updates (`errors_in_step`), errors have a small agreement.

    The strategy runs the steps of an epoch (`run_epoch`): `together` is the usual way, in which every rank takes every
    step; another way uses `guarded`, `begin_batch` and `end_batch`, and ends when this rank's part is done.

    Checkpoints are written between two steps of `together`, or after an epoch; the training begins where the newest one
    was, which may be in the middle of an epoch.

    What is done is noted in `position`, after each part that ranks do together: a step, an evaluation, an event. So
    `run` can be called again when a rank has failed, and goes on there (see trainers.recovery.recovery).

    batches: of the training, from which a strategy takes its rank's.
    watched: what callbacks get as their `trainer`. goes_on: whether the fit goes on when a rank fails.
    validate: evaluates the model after an epoch, on all ranks; None for none.
    callbacks: the user's, this rank's own.
    fetches_ahead: whether a thread fetches batches before they are needed.
    saver: of the checkpoints; None for none.
    """

    def __init__(
        self,
        strategy: Strategy,
        batches: Batches,
        epochs: int,
        *,
        watched: Any,
        goes_on: bool,
        validate: Validation | None,
        callbacks: Sequence[Any],
        fetches_ahead: bool,
        progress: bool,
        stream: TextIO | None,
        saver: Saver | None = None,
    ) -> None:
        self.strategy, self.group, self.batches = strategy, strategy.group, batches
        self.fetches_ahead, self.saver = fetches_ahead, saver
        self.position, self.taken = Position(), strategy.steps  # how far it is, and the strategy's steps that led there
        self.history = History()
        self.logs: dict[str, Any] = {}
        self.meter = strategy.meter(batches)
        self._progress = Progress(progress, self.group.rank, batches.steps, epochs, stream)
        self._users, self._watched = callbacks, watched
        self.callbacks = Callbacks(())
        self.begun = False  # all ranks have the same callbacks, and the checkpoint that they go on from
        self.error: Exception | None = None  # this rank's, until the others have heard of it
        self.stopped = False  # all ranks know that one of them wants to stop
        self.asks = False  # whether a callback of any rank may leave out a step on its own decision
        self._asked = False  # all ranks know that it is time for a checkpoint
        self._epochs, self._validate, self._goes_on = epochs, validate, goes_on
        self._resumed = PartialEpoch()
        self._entered = -1  # the epoch that this rank has entered
        self._since = 0.0  # when this epoch began here
        self._rows = 0  # of this epoch, that were done before
        self._share = 0.0  # of the batch that this rank has computed
        on_gpu = strategy.replica.device != "cpu"
        self._look_every = LOOK_EVERY if on_gpu else 1  # looking makes the host wait for a GPU

    @np.errstate(all="ignore")  # the meter tells it better when the loss diverges
    def run(self) -> History:
        """All epochs, or those until a callback stops the training. Collective; called again it goes on."""
        if not self.begun:
            self._open()
        if self.position.epoch < 0:
            self._begin()
        while self.position.epoch < self._epochs:
            self._epoch(self.position.epoch)
        self.guarded(lambda: self.callbacks.train_end(self.logs))
        if self.saver is not None:
            self.guarded(self.saver.finish)
        self._agree("after the last epoch")
        return self.history

    def close(self) -> None:
        """The fit is over, however it has ended. Local."""
        if self.saver is not None:
            self.saver.close()
        self._progress.close()
        self.callbacks.let_go()

    def _open(self) -> None:
        """Take on a checkpoint, and see that all ranks have the callbacks that communicate. Collective."""
        self.strategy.stop_training = False
        found = None if self.saver is None else self.saver.open()
        if found is not None:
            path, progress, measured = found
            self.take_up(progress, measured)
            rest = "" if progress.epoch < self._epochs else f"; {self._epochs} epochs are done already"
            self._progress.say(f"resumed: {path}, {progress}{rest}")
        self.guarded(self._make_callbacks)
        self._agree(f"with callbacks that communicate: {', '.join(self.callbacks.collective) or 'none'}")
        asks = np.array([self.callbacks.asks], np.int64)
        self.asks = bool(combine(self.group.comm, asks, "learn who may leave steps out")[0])
        self.begun = True

    def take_up(self, progress: Checkpointed, measured: np.ndarray) -> None:
        """Go on from a checkpoint: `measured` are the values of the steps of an unfinished epoch. Local."""
        self.history[:] = map(Epoch.of_dict, progress.history)
        self._resumed = PartialEpoch(progress.epoch, progress.step, progress.seconds, measured)
        self._entered = -1

    def open_to_join(self) -> None:
        """Come to where this rank can go on with what others have. Local: the others are in the middle of it."""
        self._make_callbacks()
        self.callbacks.train_begin()
        self.begun = True

    def epoch_so_far(self) -> PartialEpoch:
        """What is done of the epoch that the fit is in, for a rank that joins. Local."""
        number, step, _ = self.position
        if self._entered == number:
            return PartialEpoch(number, step, self._resumed.seconds, self.meter.values(), self._rows)
        return self._resumed if self._resumed.epoch == number else PartialEpoch(number)

    def join(self, begun: PartialEpoch) -> None:
        """Go on at `position`, where others are. Local."""
        self._resumed, self._entered = begun, -1

    def _make_callbacks(self) -> None:
        watchers = [self.meter, self.history, self._progress, *self._users]
        self.callbacks = Callbacks(watchers, self._watched, self._epochs, self.batches.steps, self._goes_on)

    def _begin(self) -> None:
        """Tell the callbacks, and come to the first epoch. Collective."""
        self.strategy.begin_fit()
        self.guarded(self.callbacks.train_begin)
        self.guarded(lambda: self.callbacks.load_state({} if self.saver is None else self.saver.watching))
        self._agree("before the first epoch")
        goes_back = self._goes_on and not self.strategy.any_rank_may_fail
        if self.saver is not None and goes_back and not self.history and not self._resumed.step:
            self.saver.save(self.saver.progress(self.history, 0), self.callbacks, np.empty((0, 0)))
        self._go_to(self._resumed.epoch, self._resumed.step)

    def _go_to(self, epoch: int, step: int = 0) -> None:
        """An epoch is next, or the end. Local, the same on all ranks."""
        self.position = Position(self._epochs if self.strategy.stop_training else epoch, step)

    def _epoch(self, number: int) -> None:
        """What is left of an epoch, of its evaluation, and of what callbacks make of it."""
        if self.position.part == STEPS:
            self._enter(number)
            self.strategy.run_epoch(self, number)
        self._conclude(number)
        if self.saver is not None:
            self._save_after(number)
        self._go_to(number + 1)

    def _conclude(self, number: int) -> None:
        """Do the rest of an epoch whose steps are all taken: means, evaluation, events. Collective."""
        if self.position.part == STEPS:
            with self.strategy.span("epoch"):
                self._measure(number)
            self.position = Position(number, self.position.step, EVALUATION)
        if self.position.part == EVALUATION:
            if self._validate is not None:
                self.logs |= {f"{VALIDATION}{name}": value for name, value in self._validate().items()}
            self.position = Position(number, self.position.step, EVENTS)
        if self.position.part == EVENTS:
            with self.strategy.span("epoch"):
                self.guarded(lambda: self.callbacks.epoch_end(number, self.logs))
                self._agree(f"after epoch {number + 1}")
            self.position = Position(number, self.position.step, SAVE)

    def _enter(self, number: int) -> None:
        """This rank begins an epoch, unless it is in it already. Local, but for callbacks that communicate."""
        again = self._entered == number
        if not again:
            self.strategy.clock.read()  # the rest of an epoch that an error has ended
            self._since = time.perf_counter()
        self.guarded(lambda: self.callbacks.epoch_begin(number))
        if again:
            return
        self._entered = number
        if self._resumed.epoch != number:
            self._resumed = PartialEpoch(number)
        if self._resumed.step:
            self.guarded(lambda: self.meter.take_up(self._resumed.measured))
        self._rows = self.meter.rows if self._resumed.rows is None else self._resumed.rows

    def _measure(self, number: int) -> None:
        """What is told of the steps of an epoch. Collective."""
        strategy = self.strategy
        spent = time.perf_counter() - self._since, self.strategy.clock.read()
        seconds, communication = self._agree(f"after the steps of epoch {number + 1}", *spent)
        self.logs = strategy.end_epoch()
        self.guarded(self.meter.look)
        self.logs |= self.meter.means()
        if math.isnan(self.logs["loss"]) and self.group.rank == 0:
            log.warning("trainers: epoch %d has no loss: all of its steps were left out", number + 1)
        self.logs |= {
            "seconds": seconds + self._resumed.seconds,
            "samples_per_second": (self.meter.rows - self._rows) / seconds,
            "communication_share": communication / seconds,
        }

    # The steps of an epoch

    @property
    def first_step(self) -> int:
        """The step of the epoch that is next."""
        return self.position.step

    def together(self, number: int) -> None:
        """The steps of epoch `number`, each taken by all ranks together."""
        batches = self.batches.epoch(number, self.position.step)
        with closing(prefetch.ahead(batches) if self.fetches_ahead else batches) as shares:
            self._steps(number, shares)

    def _steps(self, number: int, shares: Iterator[Batch]) -> None:
        steps = self.batches.steps
        if self.stopped and self.saver is not None and 0 < self.position.step < steps:
            self._save_between(number, self.position.step)  # where a lost rank has kept it from being written
        while self.position.step < steps and not self.stopped:
            step = self.position.step
            self._step(number, step, shares)
            self.end_step()
            self.callbacks.between_steps(number, step)
            if self.saver is not None and self.position.step < steps:
                self._save_between(number, self.position.step)

    def end_step(self) -> None:
        """The next step is taken, and `strategy.measured` is of it: tell the callbacks."""
        number, step, _ = self.position
        self.position, self.taken = Position(number, step + 1), self.taken + 1
        self.guarded(partial(self.end_batch, step))

    def _step(self, number: int, step: int, shares: Iterator[Batch]) -> None:
        strategy = self.strategy
        self.guarded(partial(self.begin_batch, step))
        self.guarded(lambda: self._compute(shares))
        if self.error is not None:
            self._share = 0.0
            strategy.compute(None)
        if not strategy.errors_in_step:
            with strategy.span("agree"):
                raise_together(self.group.comm, self.error)
        wants = self.saver is not None and self.saver.wants()
        leaves_out = self._leaves_out(number, step)
        flags = float(leaves_out), float(strategy.stop_training), float(wants), float(self.error is not None)
        if leaves_out:
            strategy.replica.undo()
            strategy.measured = left_out(strategy, self._share, flags, self.meter.last())
        else:
            strategy.measured = strategy.step(flags)
        if (step + 1) % self._look_every == 0 or step + 1 == self.batches.steps:
            self.hear_flags()
        strategy.count_step()

    def _leaves_out(self, number: int, step: int) -> bool:
        """Whether all ranks leave this step out: a callback of at least one rank asks for it. Collective.

        Costs one small message, and nothing when all callbacks with a before_update are `agrees`.
        """
        if not self.asks:
            return self.callbacks.before_update(number, step)
        own = False
        try:
            own = self.callbacks.before_update(number, step)
        except Exception as error:
            if self.group.knows(error):
                raise
            self.error = self.error or error
        wanted = np.array([own, self.error is not None], np.int64)
        combine(self.group.comm, wanted, "hear whether a rank leaves a step out")
        if wanted[1]:
            raise_together(self.group.comm, self.error)
        return bool(wanted[0])

    def _compute(self, shares: Iterator[Batch]) -> None:
        strategy = self.strategy
        with strategy.span("data"):
            batch = self._fetch(shares)
            self._share = batch.share
        with strategy.span("compute"):
            strategy.compute(batch)

    def hear_flags(self) -> None:
        """What the ranks have told each other in the last step; what has failed is raised on all of them."""
        _, stop, save, failed = self.strategy.measured[-len(FLAGS) :].tolist()
        if failed:
            raise_together(self.group.comm, self.error)
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
            self.strategy.replica.check_batch(batch.x, batch.y)
        return batch

    def begin_batch(self, step: int) -> None:
        """Tell the callbacks; they may raise anything, and so may the writing of a checkpoint have."""
        if self.saver is not None:
            self.saver.check()
        self.callbacks.batch_begin(step)

    def end_batch(self, step: int) -> None:
        """Tell the callbacks, with the strategy's `measured`; they may raise anything."""
        names, logs = self.strategy.replica.metrics, {}
        if self.callbacks.read_batches:
            logs = dict(zip(names, self.strategy.measured[: len(names)].tolist(), strict=True))
        self.callbacks.batch_end(step, logs)

    def guarded(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None when it fails or this rank has failed before: the error is kept."""
        if self.error is not None:
            return None
        try:
            return action()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            if self.group.knows(error):
                raise
            self.error = error
            return None

    def _agree(self, where: str, *times: float) -> list[float]:
        """Raise on all ranks an error that no step has carried, hear of a stop; the ranks' mean times. Collective."""
        strategy = self.strategy
        self.group.agree(f"fit, {where}", self.error)
        sums = np.array([strategy.stop_training or self.stopped, *times], np.float64)
        combine(self.group.comm, sums, f"fit, {where}")
        strategy.stop_training = bool(sums[0])
        return (sums[1:] / self.group.size).tolist()

    # When a rank has failed, and checkpoints

    def go_back(self) -> bool:
        """Go back to the newest checkpoint; false when there is none. Collective."""
        found = None if self.saver is None else self.saver.go_back()
        if found is None or self.saver is None:
            return False
        path, progress, measured = found
        self.take_up(progress, measured)
        self.position, self.taken = Position(progress.epoch, progress.step), self.strategy.steps
        self.stopped = False
        self.callbacks.load_state(self.saver.watching)
        self._progress.say(f"back to: {path}, {progress}")
        return True

    def step_back(self) -> None:
        """The last step is taken once more. Local."""
        number, step, _ = self.position
        self.position, self.taken = Position(number, step - 1), self.taken - 1
        self.stopped = False  # whoever wants to stop says it once more
        self.meter.step_back()

    def save_now(self) -> None:
        """Write a checkpoint of where the fit is, before the job stops. Collective.

        An epoch whose steps are all taken is evaluated, and callbacks are told its end: the checkpoint has both.
        Nothing is written in the middle of an epoch whose steps ranks do not take together: nobody could go on from it.
        """
        saver, (number, step, part) = self.saver, self.position
        if saver is None or not 0 <= number < self._epochs:
            return
        if part == STEPS and not self.strategy.synchronous:
            if self.group.rank == 0:
                log.warning("trainers: no checkpoint is written in the middle of epoch %d: %s", number + 1, APART)
            return
        if part == STEPS and 0 < step < self.batches.steps:
            self._save_here(number, step)
        elif part == STEPS and not step:
            saver.save(saver.progress(self.history, number), self.callbacks, np.empty((0, 0)))
        else:
            self._conclude(number)
            if not self._cut_short:
                saver.save(saver.progress(self.history, number + 1), self.callbacks, np.empty((0, 0)))
        saver.finish()

    def _save_here(self, number: int, step: int) -> None:
        assert self.saver is not None
        self.meter.look()
        seconds = self._resumed.seconds + time.perf_counter() - self._since
        progress = self.saver.progress(self.history, number, step, seconds)
        self.saver.save(progress, self.callbacks, self.meter.values())

    def _save_between(self, number: int, step: int) -> None:
        """Write a checkpoint before `step` of an epoch, when it is time or the training stops here. Collective."""
        assert self.saver is not None
        asked, self._asked = self._asked, False
        if self.stopped or self.saver.due(number * self.batches.steps + step, asked):
            self._save_here(number, step)

    @property
    def _cut_short(self) -> bool:
        """Whether the epoch ended before its last step. Then a checkpoint was written there, or none can be."""
        return self.strategy.cut_short or (self.stopped and self.meter.rows < self.batches.rows)

    def _save_after(self, number: int) -> None:
        """Write a checkpoint after an epoch, when it is time, the best, or the last. Collective."""
        saver = self.saver
        assert saver is not None
        if self._cut_short:
            return
        best = saver.is_best(self.history)
        last = number + 1 == self._epochs or self.strategy.stop_training
        if saver.due_after(number + 1) or best or last:
            saver.save(saver.progress(self.history, number + 1), self.callbacks, np.empty((0, 0)), best)
