"""The loop of a fit: its steps and epochs, and the position at which it continues after a failure."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from allreduce.arrays import gpu
from allreduce.elastic.standby import JOINED
from allreduce.transport.control import all_values, combine, on_all_ranks, raise_together, together
from allreduce.transport.wait import wait_for
from trainers.data import Batch, BatchSource
from trainers.errors import DivergedError
from trainers.files.checkpoint import BEGIN, EVALUATION, EVENTS, SAVE, STEPS, Arrays, Progress
from trainers.fit import prefetch
from trainers.fit.checkpointing import Saver
from trainers.fit.loader import no_batch_error
from trainers.group import broadcast_arrays
from trainers.replica import Replica, check_rows, undo_batch
from trainers.strategies import alike
from trainers.strategies.interface import Strategy
from trainers.strategies.rule import FLAGS, WEIGHT, logs_of
from trainers.watching.callback import Callbacks, checked
from trainers.watching.history import VALIDATION, Epoch, History
from trainers.watching.meter import CHECK_EVERY
from trainers.watching.progress import Progress as Printer

log = logging.getLogger("trainers")

NO_RESUME = "ranks do not take steps together, so no training could resume from it; the previous checkpoint stays"
POSITION = "learn the positions of the ranks in a fit"
Validation = Callable[[], dict[str, float]]


def reduce_left_out_step(strategy: Strategy, share: float, flags: tuple[float, ...], last: np.ndarray) -> None:
    """Sum the metrics and flags of a step that is left out, without an update: as `strategy.core(flags)`. Collective.

    share: this rank's share of the batch; its metrics are already weighted by it. Ranks whose metrics are not finite
        are not counted. last: the metrics to return if no rank is counted.
    """
    metrics = len(strategy.replica.metrics)
    measured = strategy.measured
    own = gpu.on_host(measured)[:metrics].astype(np.float64)
    sums = np.zeros(metrics + 1 + len(flags))
    if np.isfinite(own).all():
        sums[: metrics + 1] = [*own, share]
    sums[metrics + 1 :] = flags
    weight = metrics + 1 + WEIGHT
    sums[weight] *= np.isfinite(own).all()
    wait_for(strategy.group.comm, strategy.group.comm.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), "leave a step out")
    means = sums[:metrics] / sums[metrics] if sums[metrics] else last
    if strategy.replica.counts and sums[weight] > 0:
        means[0] = sums[0] / sums[weight]
    result = np.concatenate([means, sums[metrics + 1 :]]).astype(measured.dtype)
    gpu.write(measured, result)


class Fit:
    """A fit of a strategy on the ranks of its group.

    - A rank that meets an error keeps it and contributes zero gradients. A flag that is sent with the gradients informs
        the other ranks, and all raise the error before any updates. `strategy.stop_training` travels in the same way.
    - The strategy runs the steps of an epoch (`run_epoch`): by `run_steps`, in which every rank takes every step, or by
        `keep_error`, `begin_batch` and `end_batch`.
    - `progress` advances after everything that the ranks do together. `run` continues there, whether the fit begins,
        resumes, goes back, joins other ranks, or goes on after a failure (see trainers.recovery.recovery).

    batches: of the training; a strategy takes its rank's parts. watched: what callbacks get as their `trainer`.
        validate: evaluates the model after an epoch, on all ranks; or None. callbacks: the user's on this rank.
        progress: prints the progress. saver: writes the checkpoints; or None.
    """

    def __init__(
        self,
        strategy: Strategy,
        batches: BatchSource,
        epochs: int,
        *,
        watched: Any,
        validate: Validation | None,
        callbacks: Sequence[Any],
        progress: Printer,
        saver: Saver | None = None,
    ) -> None:
        self.strategy, self.group, self.batches = strategy, strategy.group, batches
        self.saver = saver
        self.progress, self.taken = Progress(stage=BEGIN), strategy.steps  # and `strategy.steps` at it
        self.history = History()
        self.meter = strategy.make_meter(batches)
        self._printer, self._users, self._watched = progress, callbacks, watched
        self.callbacks = Callbacks(())
        self.begun = False  # whether all ranks have checked their callbacks, and loaded the checkpoint, if any
        self.error: Exception | None = None  # of this rank, which the other ranks do not know yet
        self.stopped = False  # a rank has asked to stop, and all ranks know it
        self.asks = False  # whether a callback may decide on one rank to leave out a step, so that ranks must agree
        self.looks = False  # whether a callback may look at the model after an epoch, on some rank
        self._differ = False  # all ranks know that their batches differ, which must be the same
        self._asked = False  # all ranks know that it is time for a checkpoint
        self._epochs, self._validate, self._goes_on = epochs, validate, watched.goes_on
        self._entered = -1  # the last epoch that this rank has begun
        self._since = 0.0  # when this epoch began here
        self._share = 0.0  # this rank's share of the current batch
        on_gpu = strategy.replica.device != "cpu"
        self._read_every = CHECK_EVERY if on_gpu else 1  # reading the flags makes the host wait for a GPU

    @np.errstate(all="ignore")  # the meter reports a diverged loss
    def run(self) -> History:
        """Run the epochs until the last one or until a callback stops the training; returns the history. Collective.
        Called again after a failure, it continues at `progress`."""
        if not self.begun:
            self._open()
        if self.progress.stage == BEGIN:
            self._begin()
        while self.progress.epoch < self._epochs:
            self._epoch(self.progress.epoch)
        self.strategy.owners.end_round()
        self.keep_error(lambda: self.callbacks.train_end(self.progress.logs))
        if self.saver is not None:
            self.keep_error(self.saver.finish)
        self._agree("after the last epoch")
        return self.history

    def close(self) -> None:
        """Close the saver, the progress bar and the callbacks. Local."""
        if self.saver is not None:
            self.saver.close()
        self._printer.close()
        self.callbacks.release()
        self.batches.close()

    def _open(self) -> None:
        """Load the checkpoint, if any, and check that all ranks have the same collective callbacks. Collective."""
        self.strategy.stop_training = False
        found = None if self.saver is None else self.saver.open()
        if found is not None:
            path, progress = found
            self._load_checkpointed(progress)
            rest = "" if progress.epoch < self._epochs else f"; {self._epochs} epochs are done already"
            how = f"; {self.batches.how_resumed}" if self.batches.how_resumed else ""
            self._printer.print_line(f"resumed: {path}, {progress}{rest}{how}")
        self.keep_error(self._make_callbacks)
        self._agree(f"with callbacks that communicate: {', '.join(self.callbacks.collective) or 'none'}")
        self._learn_callbacks()
        self.begun = True

    def _learn_callbacks(self) -> None:
        """Learn what the callbacks of any rank do, and whether its last step is unfinished. Collective."""
        callbacks, core = self.callbacks, self.strategy.core
        unfinished = core is not None and core.unfinished
        asks = np.array([callbacks.asks, callbacks.looks, callbacks.inspects, unfinished], np.int64)
        combine(self.group.comm, asks, "learn whether a rank may leave steps out")
        self.asks, self.looks, inspects, unfinished = map(bool, asks)
        if core is not None:
            core.begin(early=not inspects, unfinished=unfinished)

    def _load_checkpointed(self, progress: Progress) -> None:
        """Continue where a checkpoint was written. Collective. Raises CheckpointError on all ranks."""
        progress.stage = min(self.progress.stage, STEPS)  # the fit may not have begun yet
        assert self.saver is not None
        together(self.group.comm, partial(self.load, progress, self.saver.loader))

    def load(self, progress: Progress, loader: dict[str, np.ndarray] | None = None) -> None:
        """Continue at this progress, of a checkpoint or another rank. loader: this rank's own place in its loader, if
        it is known. Local. Raises CheckpointError."""
        place = progress.settings.get("position"), loader or {}
        self.batches.seek(progress.epoch, progress.step, progress.total, *place)
        self.history[:] = map(Epoch.of_dict, progress.history)
        self.progress, self.taken, self._entered = progress, self.strategy.steps, -1

    def open_to_join(self) -> None:
        """Prepare this rank to join the fit of the other ranks, which have begun it. Local."""
        self._make_callbacks()
        self.callbacks.train_begin()
        self.begun = True

    def snapshot(self, epoch: int | None = None, step: int = 0) -> Progress:
        """Return the progress at `step` of `epoch`, by default here, for a checkpoint or another rank. Local."""
        here = self.progress
        if epoch is None:
            epoch, step = here.epoch, here.step
        entered, (position, _) = self._entered == epoch, self.batches.tell(epoch, step)
        return replace(
            here if entered or epoch == here.epoch else Progress(),
            epoch=epoch,
            step=step,
            total=self.batches.total(epoch, step),
            settings={"position": position},
            history=[each.as_dict() for each in self.history[: epoch + (here.stage > EVENTS)]],
            values=(self.meter.values() if entered else here.values) if step else Progress().values,
            stops=[self.stopped, self.strategy.stop_training],
        )

    def _make_callbacks(self) -> None:
        rule, self._users = self.strategy.rule, checked(self._users)
        rule.plan(self._epochs, self.batches.length)
        watchers = [self.meter, *rule.meters, self.history, self._printer, *self._users]
        for each in rule.applied:
            watchers += each.watchers
        self.callbacks = Callbacks(watchers, self._watched, self._epochs, self.batches.planned, self._goes_on)

    def _begin(self) -> None:
        """Call train_begin of the callbacks, write a first checkpoint if a failure would need it, and set the first
        position. Collective."""
        # again: a checkpoint may have an average that this fit does not keep
        self.keep_error(partial(self.strategy.rule.begin, trains=len(self.history) < self._epochs))
        self.keep_error(self.callbacks.train_begin)
        self.keep_error(lambda: self.callbacks.load_state({} if self.saver is None else self.saver.watching))
        self._agree("before the first epoch")
        goes_back = self._goes_on and not self.strategy.owners.any_rank_may_fail
        if self.saver is not None and goes_back and not self.history and not self.progress.step:
            self._save(0)
        self.progress.stage = STEPS
        if self.strategy.stop_training:
            self._go_to(self._epochs)

    def _go_to(self, epoch: int) -> None:
        """Go to the beginning of an epoch. Local, the same on all ranks."""
        self.progress = Progress(epoch, logs=self.progress.logs)

    def _epoch(self, number: int) -> None:
        """Run the rest of epoch `number`: steps, evaluation, callbacks, checkpoint. Collective."""
        if self.progress.stage == STEPS:
            self._enter(number)
            self.strategy.run_epoch(self, number)
        self._conclude(number)
        if self.saver is not None:
            self._save_after(number)
        self._go_to(self._epochs if self.strategy.stop_training else number + 1)

    def _conclude(self, number: int) -> None:
        """Do the rest of an epoch whose steps are all taken: means, evaluation, callbacks. Collective."""
        at = self.progress
        if at.stage == STEPS:
            with self.strategy.clock.span("epoch"):
                self._make_logs(number)
            at.stage = EVALUATION
        if at.stage == EVALUATION:
            if self._validate is not None:
                at.logs |= {f"{VALIDATION}{name}": value for name, value in self._validate().items()}
            at.stage = EVENTS
        if at.stage == EVENTS:
            if self.looks:
                self.strategy.owners.end_round()
            with self.strategy.clock.span("epoch"):
                words = ", ".join(f"{name} {value:.6g}" for name, value in at.logs.items() if isinstance(value, float))
                log.info("epoch %d of %d: %s", number + 1, self._epochs, words)
                self.keep_error(lambda: self.callbacks.epoch_end(number, at.logs))
                self._agree(f"after epoch {number + 1}")
            at.stage = SAVE

    def _enter(self, number: int) -> None:
        """Begin epoch `number` on this rank, unless it has begun. Local, except for collective callbacks."""
        again = self._entered == number
        if not again:
            self.strategy.clock.read()  # discard the time of an epoch that an error ended
            self._since = time.perf_counter()
        self.keep_error(lambda: self.callbacks.epoch_begin(number))
        if again:
            return
        self._entered = number
        if self.progress.step:
            self.keep_error(lambda: self.meter.load_values(self.progress.values))

    def _make_logs(self, number: int) -> None:
        """Set `progress.logs` to the metrics and times of the steps of an epoch. Collective."""
        strategy = self.strategy
        spent = time.perf_counter() - self._since, self.strategy.clock.read()
        seconds, communication = self._agree(f"after the steps of epoch {number + 1}", *spent)
        logs = strategy.end_epoch()
        self.keep_error(self.meter.check_loss)
        logs |= self.meter.means() | logs_of(self.group.comm, strategy.rule, strategy.mirrors == "step")
        if math.isnan(logs["loss"]) and self.group.rank == 0:
            log.warning("trainers: epoch %d has no loss: all of its steps were left out", number + 1)
        whole = seconds + self.progress.seconds
        self.progress.logs = logs | {
            "seconds": whole,
            "samples_per_second": self.meter.rows / whole,
            "communication_share": communication / seconds,
        }

    # The steps of an epoch

    @property
    def first_step(self) -> int:
        return self.progress.step

    def run_steps(self, number: int) -> None:
        """Run the rest of the steps of epoch `number`; all ranks take each step together. Collective."""
        with self.shares(number) as shares:
            while self.progress.step < self.batches.steps and not self.stopped:
                self._step(number, self.progress.step, shares)
                self.end_step()
                self._after_step()

    @contextmanager
    def shares(self, number: int) -> Iterator[Iterator[Batch]]:
        """Context manager: this rank's shares of the rest of the batches of epoch `number`. Collective."""
        step = self.progress.step
        if self.batches.streams:
            self.begin_stream(number, step)
        batches: Any = self.batches.epoch(number, step)
        if self.batches.ahead:
            batches = prefetch.ahead(map(self._staged, batches))
        with closing(batches) as shares:
            if self.stopped and self.saver is not None and 0 < step < self.batches.steps:
                self._save_between(number, step)  # a failure has prevented this checkpoint
            yield shares

    def _staged(self, batch: Batch) -> Batch:
        """Return a batch whose rows are on the replica's device."""
        replica = self.strategy.replica
        if replica.device == "cpu" or not batch.own or not replica.stage:
            return batch
        x, y, *_ = replica.stage(batch.data)
        return batch._replace(data=(x, y, *batch.data[2:]))

    def begin_stream(self, number: int, step: int) -> None:
        """Read each rank's batch `step` of an epoch, and add up their rows. Raises an error of any rank on all ranks.
        Collective."""
        own = self.keep_error(partial(self.batches.begin, number, step))
        marks = alike.marks(self.batches, range(step, step + 1), self.group.size)
        sums = np.array([own or 0, self.error is not None, *marks], np.int64)
        combine(self.group.comm, sums, "learn the rows of a batch")
        if sums[1]:
            raise_together(self.group.comm, self.error)
        self._differ = alike.differ(sums[2:].tolist())
        self.check_alike()
        self.batches.learn(step, int(sums[0]))
        if not step and not sums[0]:
            raise on_all_ranks(no_batch_error(number), self.group.comm)

    def end_step(self) -> None:
        """Advance the position by one step, and call the callbacks with `strategy.measured` of that step. Local."""
        step = self.progress.step
        self.advance(1)
        self.keep_error(partial(self.end_batch, step))

    def advance(self, steps: int) -> None:
        """Advance the position by a number of steps. Local."""
        self.progress.step += steps
        self.taken += steps

    def end_steps(self, steps: int) -> None:
        """End steps that this rank has taken on its own: all ranks have taken them now. Collective."""
        self.advance(steps)
        self._after_step()

    def _after_step(self) -> None:
        """Call between_steps of the callbacks, and write a checkpoint if one is due. Collective."""
        number, step = self.progress.epoch, self.progress.step
        for callback in self.callbacks.between_steps:  # all of them, since some communicate
            self.keep_error(partial(callback.between_steps, number, step - 1), always=True)
        if self.saver is not None and step < self.batches.steps:
            self._save_between(number, step)

    def _step(self, number: int, step: int, shares: Iterator[Batch]) -> None:
        strategy = self.strategy
        self.check_alike()
        self.keep_error(partial(self.begin_batch, step))
        self.keep_error(lambda: self._compute(shares))
        self.keep_error(partial(self.batches.peek, step + 1))
        if self.error is not None:
            self._share = 0.0
            strategy.core.compute(None)
        if self._read_every > 1:
            with strategy.clock.span("agree"):
                raise_together(self.group.comm, self.error)
        leaves_out = self._leaves_out(number, step)
        flags = self.flags(leaves_out)
        if leaves_out:
            undo_batch(strategy.replica)
            reduce_left_out_step(strategy, self._share, flags, self.meter.last())
        else:
            strategy.core(flags)
            self.keep_error(strategy.rule.raise_kept)
        if (step + 1) % self._read_every == 0 or step + 1 == self.batches.steps:
            self.read_flags()
        strategy.count_step()

    def check_alike(self) -> None:
        """Raise DataError on all ranks if their next batches differ, which must be the same. Collective if they do."""
        if self._differ and (error := alike.error(self.batches, self.progress.epoch, self.group.comm)):
            raise error

    def flags(self, leaves_out: bool = False, *, steps: int = 1) -> tuple[float, ...]:
        """Return this rank's values of FLAGS. steps: taken since the position. Local."""
        step = self.progress.step + 1
        marks = alike.marks(self.batches, range(step, step + steps), self.group.size)
        is_time = self.saver is not None and self.saver.is_time()
        stop, failed = self.strategy.stop_training, self.error is not None
        weight, unused = self.strategy.rule.weight, bool(self.strategy.rule.unused.any())
        return tuple(map(float, (leaves_out, *marks, self.batches.coming, weight, unused, stop, is_time, failed)))

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
        combine(self.group.comm, wanted, "learn whether a rank leaves a step out")
        if wanted[1]:
            raise_together(self.group.comm, self.error)
        return bool(wanted[0])

    def _compute(self, shares: Iterator[Batch]) -> None:
        strategy = self.strategy
        with strategy.clock.span("data"):
            batch = self.check_batch(next(shares))
            self._share = batch.share
        with strategy.clock.span("compute"):
            strategy.core.compute(batch)

    def read_flags(self, steps: int = 1) -> None:
        """Read the flags of the last step, `steps` after the position. Raises an error of any rank on all ranks.
        Collective if there is one."""
        _, *marks, rows, _, _, stop, save, failed = self.strategy.measured[-len(FLAGS) :].tolist()
        if failed:
            raise_together(self.group.comm, self.error)
        self.batches.learn(self.progress.step + steps, round(rows))
        self.stopped, self._asked, self._differ = bool(stop), bool(save), alike.differ(marks)

    def discard_if_unusable(self, gradients: Any, replica: Replica) -> bool:
        """Whether a callback discards these gradients; if so, undo the batch. For strategies whose ranks do not take
        steps together. May raise any exception.

        replica: computed the gradients; its `undo` is called if they are discarded.
        """
        unusable = self.callbacks.unusable(gradients)
        if unusable:
            undo_batch(replica)
        return unusable

    def check_batch(self, batch: Batch) -> Batch:
        """Return `batch` if the replica accepts it; raises ArgumentError otherwise."""
        if not self.batches.checked:
            for rows in batch.parts or [batch.data]:
                check_rows(self.strategy.replica, rows, batch=True)
        return batch

    def begin_batch(self, step: int) -> None:
        """Set the learning rates of a step, and call batch_begin of the callbacks. May raise any exception, also the
        error of a checkpoint that is being written."""
        if self.saver is not None:
            self.saver.check()
        if self.strategy.rates_follow_batches:
            self.strategy.rule.begin_step(self.batches.total(self.progress.epoch, step))
        self.callbacks.batch_begin(step)

    def end_batch(self, step: int) -> None:
        """Call batch_end of the callbacks with the metrics in `strategy.measured`. May raise any exception."""
        names, logs = self.strategy.replica.metrics, {}
        if self.callbacks.read_batches:
            logs = dict(zip(names, self.strategy.measured[: len(names)].tolist(), strict=True))
            known = self.strategy.rule.meters if self.strategy.mirrors == "step" else []  # equal on all ranks
            logs |= {meter.name: float(meter.of_step) for meter in known if meter.of_step is not None}
        self.callbacks.batch_end(step, logs)

    def keep_error(self, action: Callable[[], Any], always: bool = False) -> Any:
        """Return action(); if it raises, keep the error and return None. Do nothing if an error is kept already, unless
        `always`. Raises errors that all ranks know."""
        if self.error is not None and not always:
            return None
        try:
            return action()
        except Exception as error:  # any exception: the other ranks must not wait for this one
            if self.group.knows(error):
                raise
            self.error = self.error or error
            return None

    def _agree(self, where: str, *times: float) -> list[float]:
        """Raise a kept error on all ranks, agree on `stop_training`, and return the means of `times` over the ranks.
        Collective."""
        strategy = self.strategy
        self.group.agree(f"fit, {where}", self.error)
        sums = np.array([strategy.stop_training or self.stopped, *times], np.float64)
        combine(self.group.comm, sums, f"fit, {where}")
        strategy.stop_training = bool(sums[0])
        return (sums[1:] / self.group.size).tolist()

    # Failures and checkpoints

    def go_back(self) -> bool:
        """Load the newest checkpoint, and continue there. Returns False if there is none. Collective."""
        found = None if self.saver is None else self.saver.go_back()
        if found is None or self.saver is None:
            return False
        path, progress = found
        self._load_checkpointed(progress)
        self.stopped = False
        self.callbacks.forget()
        self.callbacks.load_state(self.saver.watching)
        self._printer.print_line(f"back to: {path}, {progress}")
        return True

    def rejoin(self) -> None:
        """Bring all ranks to the position of the rank that is furthest ahead, after they have loaded the state after
        `strategy.steps` steps. Collective.

        - The ranks complete each step, and each stage after the steps, together. So they are at most one apart.
        - A rank that is behind calls its own callbacks of the step. A rank that joins takes another rank's callbacks'
            state.
        """
        comm, rank = self.group.comm, self.group.rank
        joins = self.group.previous[rank] == JOINED
        if not joins:
            self._follow_state(self.strategy.steps - self.taken)
        self._learn_callbacks()
        own_place = [] if joins else self.progress.place
        rows = all_values(comm, [own_place, self.callbacks.called(), self.batches.length], POSITION)
        self.callbacks.repeat((tuple(event), called) for _, (event, called), _ in rows)
        places = [place for place, *_ in rows]
        ahead = places.index(max(places))
        if joins:
            self.strategy.rule.plan(self._epochs, rows[ahead][-1])
        if min(places) < places[ahead]:
            own = together(comm, lambda: self.snapshot().pack() | self.callbacks.state() if rank == ahead else {})
            state = broadcast_arrays(comm, own, ahead, POSITION)
            self._catch_up(Progress.taken_from(state), state if joins else None)
        self.keep_error(self.callbacks.ranks_change)
        if self.saver is not None:
            self.saver.rejoin()
        self.meter.check_all()

    def _catch_up(self, progress: Progress, state: Arrays | None) -> None:
        """Go to the progress of a rank that is ahead. state: of its callbacks, if this rank joins. Local."""
        if state is not None:
            self.load(progress)
            self.keep_error(lambda: self.callbacks.load_state(state))
        if self.progress.place < progress.place or state is not None:
            self.progress = progress
            self.stopped, self.strategy.stop_training = progress.stops

    def _follow_state(self, gained: int) -> None:
        """Follow the state that was loaded, which has gained steps: -1, 0 or 1, or a round of steps that this rank has
        taken on its own. Local."""
        if gained > 0:
            self.read_flags(gained)
            if self.strategy.mirrors != "step":
                self.advance(gained)
                return
            with suppress(DivergedError):  # all ranks raise it together later, in `check_all`
                self.end_step()
        elif gained < 0:  # the step is taken again
            self.advance(gained)
            self.stopped = False  # a rank that wants to stop asks again
            self.meter.load_values(self.meter.values()[: self.progress.step])
            for meter in self.strategy.rule.meters:
                meter.step_back()

    def save_now(self) -> None:
        """Write a checkpoint at the current position, before the job stops. Collective.

        If all steps of the epoch are taken, it is evaluated and its epoch_end callbacks are called first. If the ranks
        do not take steps together, nothing is written in the middle of an epoch.
        """
        saver, (number, step, stage) = self.saver, self.progress.place
        if saver is None or stage == BEGIN or number >= self._epochs:
            return
        if stage == STEPS and not self.strategy.synchronous:
            if self.group.rank == 0:
                log.warning("trainers: no checkpoint is written in the middle of epoch %d: %s", number + 1, NO_RESUME)
            return
        if stage == STEPS and (not step or step < self.batches.steps):
            self._save(number, step)
        else:
            self._conclude(number)
            if not self._cut_short:
                self._save(number + 1)
        saver.finish()

    def _save(self, number: int, step: int = 0) -> None:
        """Write a checkpoint after `step` steps of an epoch, with the learning rates from before the fit.

        Collective.
        """
        assert self.saver is not None
        if step:
            self.meter.check_loss()
        together(self.group.comm, self.strategy.rule.end_step)
        progress = self.snapshot(number, step)
        if step:
            progress.seconds += time.perf_counter() - self._since
        self.saver.save(progress, self.callbacks)

    def _save_between(self, number: int, step: int) -> None:
        """Write a checkpoint before `step` of an epoch, if one is due or the training stops here. Collective."""
        assert self.saver is not None
        asked, self._asked = self._asked, False
        if self.stopped or self.saver.due(self.batches.total(number, step), asked):
            self._save(number, step)

    @property
    def _cut_short(self) -> bool:
        """Whether the epoch ended before its last step. A checkpoint was then written at that step, or none is
        possible."""
        return self.strategy.cut_short or (self.stopped and self.progress.step < self.batches.steps)

    def _save_after(self, number: int) -> None:
        """Write a checkpoint after an epoch, if one is due or the epoch is the last. Collective."""
        saver = self.saver
        assert saver is not None
        if self._cut_short:
            return
        last = number + 1 == self._epochs or self.strategy.stop_training
        if saver.due_after(number + 1) or last:
            self._save(number + 1)
