"""Callbacks with the events of Keras."""

import csv
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

import numpy as np

from trainers.errors import ArgumentError

Logs = Mapping[str, Any]
Event = tuple[float, int]  # an epoch, -1 before the first and infinity after the last; BEGIN or END
BEGIN, END = 0, 1
NO_EVENT = (-math.inf, BEGIN)


class Callback:
    """Base class of callbacks; override the events you need. Every rank calls its own callbacks.

    trainer: the trainer, while it fits; None outside of a fit. A callback uses no more of it than this:
        replica: this rank's copy of the model. strategy: holds the model's state together with the other ranks.
        group: the ranks, for messages to each other. rank, size, topology: they change after a failure; rank is -1 on a
            rank that joins a fit, until `on_ranks_change`.
        measured: 1-D array on the replica's device: the metrics of the last step, then the sums of the ranks' flags.
        goes_on: whether the fit continues after a failure. trace: the trace in which the fit is recorded, or None.
        record(trace), save(path): see Trainer.
        stop_training: the one attribute to set: on any rank it ends the fit on all of them, after the next batch, or at
            the end of the epoch.

    epoch and batch count from 0. logs are numbers by name, the same on all ranks: "loss", "accuracy", ... of a
    batch or an epoch; at the end of an epoch also "val_loss", ... and "seconds", "samples_per_second",
    "communication_share", and of trainers with servers "staleness" (how many gradients were 0, 1, 2, ... updates
    stale) and "dropped". An exception on any rank ends the fit on all ranks, with the same error.
    """

    trainer: Any = None
    collective = False  # True: it communicates, but not in batch events; given on all ranks or on none
    reads_batches = True  # False: on_train_batch_end does not use logs
    reads_model = True  # False: its epoch events don't use the model, so ranks may have different parameters
    agrees = False  # True: before_update returns the same on all ranks, so the trainer sends no message for it
    verbose = 0  # 1: `_say` prints

    def set_trainer(self, trainer: Any) -> None:
        """Set `trainer` when a fit begins; None when it has ended, also by an error."""
        if trainer is None and self.trainer is not None:
            self._release()
        self.trainer = trainer

    def _release(self) -> None:
        """Release the resources of the fit, which has ended, also by an error. Local; `trainer` is still set."""

    def _say(self, text: str) -> None:
        """Print a line on rank 0 if `verbose`."""
        if self.verbose and self.trainer.rank == 0:
            print(text, file=sys.stdout, flush=True)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called when the fit begins. On a joining rank, trainer.rank is -1 here; `load_state`, with the state of the
        other ranks, and `on_ranks_change` follow."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called when the fit has ended without an error."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before an epoch; `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch; `logs` has the means of the epoch."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before a batch; `logs` is empty."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Called after a batch; `logs` has its loss and metrics."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Keras' other name of on_train_batch_begin."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Keras' other name of on_train_batch_end."""

    def before_update(self, epoch: int, batch: int) -> bool:
        """Called after all ranks have computed their gradients, before these are averaged. If it returns True on any
        rank, all ranks leave the step out, which then does not count in the means of its epoch (NaN without any step).

        Where ranks take steps together, this and `between_steps` are called on all ranks, also on one with an error. So
        a `collective` callback may communicate in them, but must raise its errors on all ranks.
        """
        return False

    def between_steps(self, epoch: int, batch: int) -> None:
        """Called after all ranks have taken a step."""

    def unusable(self, gradients: Any) -> bool:
        """Return True to discard this rank's gradients; called if ranks do not take steps together. Local."""
        return False

    def on_ranks_change(self) -> None:
        """Called when the fit continues after a failure, between any two other events, with new trainer.rank, .size and
        .topology. The new rank 0 takes over the files of rank 0. An unfinished batch begins again."""

    def state(self) -> dict[str, Any]:
        """The state of this callback for a checkpoint: numbers, or arrays that are not changed any more."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a result of `state`, as arrays. Called after on_train_begin of a resumed fit, if there is a state; the
        next event is on_epoch_begin, of an unfinished epoch too."""


class FileCallback(Callback):
    """A callback whose files rank 0 writes. If rank 0 fails, the new rank 0 continues the files, in which the epoch at
    whose end rank 0 failed may be missing."""

    reads_model = False

    _writes: bool | None = None  # whether this rank writes the files; None outside of a fit

    def _open(self, append: bool) -> None:
        """Open the files. append: to the files that another rank 0 began in this fit."""
        raise NotImplementedError

    def _write_epoch(self, epoch: int, logs: Logs) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        """Close the files, if any are open."""
        raise NotImplementedError

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._writes = False
        self._begin(append=False)

    def on_ranks_change(self) -> None:
        if self._writes is False:
            self._begin(append=True)

    def _begin(self, append: bool) -> None:
        if self.trainer.rank == 0:
            self._open(append)
            self._writes = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._writes:
            self._write_epoch(epoch, logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._finish()

    def _release(self) -> None:
        with suppress(ArgumentError):  # another error has already ended the fit
            self._finish()

    def _finish(self) -> None:
        self._writes = None
        self._close()


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise an error of the block as an ArgumentError: this file or folder can't be written."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


NEEDED = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")


def checked(callbacks: Any) -> tuple[Any, ...]:
    """Return the callbacks as a tuple. Raises ArgumentError if one of the objects is no callback."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise ArgumentError(f"callbacks must be a list of callbacks, got {callbacks!r}")
    every = tuple(callbacks)
    for callback in every:
        if isinstance(callback, type):
            raise ArgumentError(f"callbacks: {callback.__name__} is a class; give an object, {callback.__name__}(...)")
        if lacks := [event for event in NEEDED if not callable(getattr(callback, event, None))]:
            raise ArgumentError(
                f"callbacks: {callback!r} is no callback (no {lacks[0]}); derive it from trainers.callbacks.Callback"
            )
    return every


class Callbacks:
    """Calls the events of several callbacks.

    Keras' own callbacks work too, if they use nothing of a model but `stop_training`.

    - After a failure in the middle of an event, the event is called again.
    - A callback that has finished the event is not called twice.
    - Collective callbacks are called again on all ranks, with the attributes that they had before the event.

    keeps: whether events may be repeated, so that the attributes of collective callbacks must be kept.
    """

    def __init__(
        self, callbacks: Iterable[Any], trainer: Any = None, epochs: int = 0, steps: int | None = 0, keeps: bool = False
    ) -> None:
        self._all = list(callbacks)
        for callback in self._all:
            if hasattr(callback, "set_params"):
                callback.set_params({"epochs": epochs, "steps": steps, "verbose": 0})
            set_trainer = getattr(callback, "set_trainer", None) or getattr(callback, "set_model", None)
            if set_trainer is not None:
                set_trainer(trainer)
        self._batch_begin = self._with("on_train_batch_begin", "on_batch_begin")
        self._batch_end = self._with("on_train_batch_end", "on_batch_end")
        self.looks = any(getattr(each, "reads_model", True) for each in self._with("on_epoch_begin", "on_epoch_end"))
        # Collective callbacks come first, so that an error in another callback can't keep this rank from calling them.
        self._before_update = sorted(self._with("before_update"), key=lambda each: not each.collective)
        self.asks = any(not _agrees(each) for each in self._before_update)
        self.inspects = bool(self._before_update)  # gradients must wait for it
        self.between_steps, self._unusable = self._with("between_steps"), self._with("unusable")
        self._collective = [at for at, each in enumerate(self._all) if getattr(each, "collective", False)]
        self.collective = [type(self._all[at]).__name__ for at in self._collective]
        self.read_batches = any(getattr(each, "reads_batches", True) for each in self._batch_end)
        self._keeps = keeps
        self._event = NO_EVENT
        self._called: set[int] = set()  # indices of the callbacks that have finished it
        self._before: dict[int, dict[str, Any]] = {}  # the attributes of collective callbacks before it

    def _with(self, *events: str) -> list[Any]:
        """Return the callbacks that override one of these events."""
        return [callback for callback in self._all if any(_overrides(callback, event) for event in events)]

    def train_begin(self) -> None:
        self._call((-1, BEGIN), lambda callback: callback.on_train_begin({}))

    def train_end(self, logs: Logs) -> None:
        self._call((math.inf, END), lambda callback: callback.on_train_end(logs))

    def epoch_begin(self, epoch: int) -> None:
        self._call((epoch, BEGIN), lambda callback: callback.on_epoch_begin(epoch, {}))

    def epoch_end(self, epoch: int, logs: Logs) -> None:
        self._call((epoch, END), lambda callback: callback.on_epoch_end(epoch, logs))

    def _call(self, event: Event, action: Callable[[Any], object]) -> None:
        """Call an event of every callback that has not finished it yet."""
        if event != self._event:
            self._event, self._called, self._before = event, set(), {}
        for at, callback in enumerate(self._all):
            if at not in self._called:
                if self._keeps and at in self._collective and event[0] >= 0:
                    self._prepare(at)
                action(callback)
                self._called.add(at)

    def _prepare(self, at: int) -> None:
        """In the first call of this event, keep the attributes of a callback; in later calls, restore them first."""
        held = vars(self._all[at])
        if at in self._before:
            held.clear()
            held.update(self._before[at])
        changing = list | dict | set  # callbacks change these in place, and replace arrays
        self._before[at] = {name: copy(each) if isinstance(each, changing) else each for name, each in held.items()}

    def called(self) -> tuple[Event, list[int]]:
        """Return the last event, and the indices (among the collective callbacks) of those that have finished it.
        Local."""
        return self._event, [order for order, at in enumerate(self._collective) if at in self._called]

    def repeat(self, progress: Iterable[tuple[Event, list[int]]]) -> None:
        """Mark an event to be called again for collective callbacks that have not finished it on every rank. progress:
        `called` of every rank. Local."""
        for event, called in progress:
            if event < self._event:
                self._called -= set(self._collective)
            elif event == self._event:
                self._called -= {at for order, at in enumerate(self._collective) if order not in called}

    def forget(self) -> None:
        """Forget the last event, because the fit goes back to a checkpoint. Local."""
        self._event, self._called, self._before = NO_EVENT, set(), {}

    def ranks_change(self) -> None:
        for callback in self._all:
            if hasattr(callback, "on_ranks_change"):
                callback.on_ranks_change()

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of all callbacks, by their class, and by their number among the callbacks of that class."""
        return {
            f"{prefix}{name}": np.asarray(value)
            for prefix, callback in self._named()
            for name, value in callback.state().items()
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a result of `state` into the callbacks."""
        for prefix, callback in self._named():
            own = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
            if own:
                callback.load_state(own)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        for callback in self._all:
            if isinstance(callback, Callback):  # Keras' own have no state here
                kind = type(callback).__name__
                yield f"{kind}.{seen[kind]}.", callback
                seen[kind] += 1

    def batch_begin(self, batch: int) -> None:
        for callback in self._batch_begin:
            callback.on_train_batch_begin(batch, {})

    def batch_end(self, batch: int, logs: Logs) -> None:
        for callback in self._batch_end:
            callback.on_train_batch_end(batch, logs)

    def before_update(self, epoch: int, batch: int) -> bool:
        leaves_out = False
        for callback in self._before_update:  # all of them, since some communicate
            leaves_out |= bool(callback.before_update(epoch, batch))
        return leaves_out

    def unusable(self, gradients: Any) -> bool:
        return any(callback.unusable(gradients) for callback in self._unusable)

    def release(self) -> None:
        """Detach all callbacks from the trainer after the fit. Local."""
        for callback in self._all:
            if hasattr(callback, "set_trainer"):
                callback.set_trainer(None)


def _agrees(callback: Callback) -> bool:
    """Whether before_update returns the same on all ranks. A class that overrides before_update must set `agrees`
    itself."""
    kinds = [vars(callback), *map(vars, type(callback).__mro__)]
    positions = [next(at for at, own in enumerate(kinds) if name in own) for name in ("agrees", "before_update")]
    return callback.agrees and positions[0] <= positions[1]


def _overrides(callback: Any, event: str) -> bool:
    own = getattr(callback, event, getattr(Callback, event))
    return getattr(own, "__func__", own) is not getattr(Callback, event)
