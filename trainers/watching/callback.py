"""Callbacks: what a fit tells them, with the events of Keras, and what they see of it: `FitView`."""

import csv
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, Protocol

import numpy as np

from allreduce.topology import Topology
from allreduce.tracing.trace import Trace
from trainers.errors import ArgumentError
from trainers.group import RankGroup
from trainers.replica import Replica, Rows
from trainers.state.adopt import Target

Logs = Mapping[str, Any]
Event = tuple[float, int]  # an epoch, -1 before the first and infinity after the last; BEGIN or END
BEGIN, END = 0, 1
NO_EVENT = (-math.inf, BEGIN)


class StrategyView(Target, Protocol):
    """What a callback sees of the strategy of a fit; see trainers.strategies.interface.Strategy."""

    mirrors: str

    @property
    def fresh_gradients(self) -> Any: ...

    @property
    def fresh_rows(self) -> Sequence[Rows]: ...

    @property
    def sent_dtype(self) -> np.dtype: ...

    def apart(self) -> dict[str, str]: ...


class FitView(Protocol):
    """What a callback sees of the trainer that fits. It sets nothing there but `stop_training`.

    replica: this rank's copy of the model. strategy: holds the model's state together with the other ranks.
    group: the ranks, for messages to each other. rank, size, topology: new ones after a rank was lost; rank is -1 on a
        rank that joins a fit, until `Callback.on_ranks_change`.
    measured: the metrics of the last step on the replica's device, and behind them the flags of the ranks.
    goes_on: whether the fit goes on without a rank that is lost. trace: where the fit is recorded, if it is.
    stop_training: set on any rank, it ends the fit on all of them: after the next batch, or at the end of the epoch.
    """

    replica: Replica
    strategy: StrategyView
    group: RankGroup
    stop_training: bool

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def measured(self) -> Any: ...

    @property
    def goes_on(self) -> bool: ...

    @property
    def trace(self) -> Trace | None: ...

    def record(self, trace: Trace | None) -> None: ...

    def save(self, path: str) -> None: ...


class Callback:
    """Base of what watches a fit; override what you need. Every rank calls its own callbacks.

    trainer: the trainer, while it fits; see FitView. Setting `trainer.stop_training` on any rank ends the fit on all
        of them: after the next batch, or at the end of the epoch.

    epoch and batch count from 0. logs are numbers by name, the same on all ranks: "loss", "accuracy", ... of a
    batch or an epoch; at the end of an epoch also "val_loss", ... and "seconds", "samples_per_second",
    "communication_share", and of trainers with servers "staleness" (how many gradients were 0, 1, 2, ... updates
    behind) and "dropped". An exception on any rank ends the fit on all ranks, with the same error.
    """

    trainer: FitView = None  # type: ignore[assignment]  # None outside of a fit, in which no event comes
    collective = False  # True: it communicates, when an epoch or the fit begins or ends; given on all ranks or on none
    reads_batches = True  # False: on_train_batch_end does not look at logs
    agrees = False  # True: before_update returns the same on all ranks, so the trainer sends no message for it
    verbose = 0  # 1: `_say` prints

    def set_trainer(self, trainer: Any) -> None:
        """The fit begins, or with None it is over, well or not."""
        if trainer is None and self.trainer is not None:
            self._let_go()
        self.trainer = trainer

    def _let_go(self) -> None:
        """The fit is over, well or not: give back what belongs to it. Local; `trainer` is there for the last time."""

    def _say(self, text: str) -> None:
        """Print a line on rank 0, where the user wants it."""
        if self.verbose and self.trainer.rank == 0:
            print(text, file=sys.stdout, flush=True)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """The fit begins. On a rank that joins a fit, trainer.rank is -1 here: it has no number yet.

        `load_state` with the state of the other ranks, and `on_ranks_change`, follow there.
        """

    def on_train_end(self, logs: Logs | None = None) -> None: ...

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None: ...

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Keras' other name of on_train_batch_begin."""

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Keras' other name of on_train_batch_end."""

    def before_update(self, epoch: int, batch: int) -> bool:
        """All ranks have computed their gradients, and nothing is averaged yet. If it returns True on any rank, all
        ranks leave the step out.

        A step that is left out does not count in the means of its epoch, which are NaN where no step was taken.

        Where ranks take every step together, this and `between_steps` are called on all ranks, also on one that has met
        an error. So a callback that is `collective` may communicate in them; its errors must be raised on all ranks.
        """
        return False

    def between_steps(self, epoch: int, batch: int) -> None:
        """All ranks have taken a step."""

    def unusable(self, gradients: Any) -> bool:
        """Whether this rank leaves its gradients out, where ranks do not take steps together. Local."""
        return False

    def on_ranks_change(self) -> None:
        """A rank was lost, and the fit goes on: trainer.rank, .size and .topology are new.

        It may come between any two other events. The new rank 0 takes over the files of rank 0. A batch that was not
        finished begins again.
        """

    def state(self) -> dict[str, Any]:
        """The state of this callback for a checkpoint: numbers, or arrays that are not changed any more."""
        return {}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take on what `state` returned, as arrays: after on_train_begin of a resumed fit, if there was anything.

        The next event is on_epoch_begin, of an unfinished epoch too.
        """


class FileCallback(Callback):
    """A callback whose files rank 0 writes. When rank 0 is lost, the next rank 0 goes on with them.

    Every rank remembers the epochs of the fit, since the lost rank may not have written the last of them.
    """

    _epochs: list[tuple[int, Logs]] | None = None  # of this fit so far; None outside of a fit
    _writes = False  # whether this rank does

    def _open(self, append: bool) -> None:
        """Open the files. append: go on with the files that another rank 0 has begun in this fit."""
        raise NotImplementedError

    def _write_epoch(self, epoch: int, logs: Logs) -> None:
        """Write an epoch to the open files."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the files, if any are open."""
        raise NotImplementedError

    def _unwritten(self, epochs: list[tuple[int, Logs]]) -> list[tuple[int, Logs]]:
        """The epochs that a lost rank 0 may not have written. epochs: all of this fit, on a new rank 0."""
        return epochs[-1:]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._epochs = []
        if self.trainer.rank == 0:
            self._open(append=False)
            self._writes = True

    def on_ranks_change(self) -> None:
        if self._epochs is None or self._writes or self.trainer.rank:
            return
        self._open(append=True)
        self._writes = True
        for epoch, logs in self._unwritten(self._epochs):
            self._write_epoch(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._epochs is not None:
            self._epochs.append((epoch, logs or {}))
        if self._writes:
            self._write_epoch(epoch, logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._finish()

    def _let_go(self) -> None:
        with suppress(ArgumentError):  # the fit has ended in an error already
            self._finish()

    def _finish(self) -> None:
        self._epochs, self._writes = None, False
        self._close()


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise an error of the block as an ArgumentError, which says that this file or folder can't be written."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


class Callbacks:
    """Several callbacks as one.

    Keras' own callbacks are taken too, if they need no more of a model than `stop_training`.

    When a rank is lost in the middle of an event, the event is told again. A callback that has heard it does not hear
    it twice. But callbacks that communicate hear it again together, with the attributes that they had before it.

    keeps: whether an event may be told again.
    """

    def __init__(
        self, callbacks: Iterable[Any], trainer: Any = None, epochs: int = 0, steps: int = 0, keeps: bool = False
    ) -> None:
        self._all = list(callbacks)
        for callback in self._all:
            if hasattr(callback, "set_params"):
                callback.set_params({"epochs": epochs, "steps": steps, "verbose": 0})
            tell = getattr(callback, "set_trainer", None) or getattr(callback, "set_model", None)
            if tell is not None:
                tell(trainer)
        self._batch_begin = self._with("on_train_batch_begin", "on_batch_begin")
        self._batch_end = self._with("on_train_batch_end", "on_batch_end")
        # Callbacks that communicate come first, so that an error of another callback can't keep this rank from them.
        self._before_update = sorted(self._with("before_update"), key=lambda each: not each.collective)
        self.asks = any(not _agrees(each) for each in self._before_update)
        self._between_steps, self._unusable = self._with("between_steps"), self._with("unusable")
        self._collective = [at for at, each in enumerate(self._all) if getattr(each, "collective", False)]
        self.collective = [type(self._all[at]).__name__ for at in self._collective]
        self.read_batches = any(getattr(each, "reads_batches", True) for each in self._batch_end)
        self._keeps = keeps
        self._event = NO_EVENT
        self._heard: set[int] = set()  # the callbacks that have heard it, by their order
        self._before: dict[int, dict[str, Any]] = {}  # the attributes of those that communicate, before the event

    def _with(self, *events: str) -> list[Any]:
        """The callbacks that have one of these events."""
        return [callback for callback in self._all if any(_overrides(callback, event) for event in events)]

    def train_begin(self) -> None:
        self._tell((-1, BEGIN), lambda callback: callback.on_train_begin({}))

    def train_end(self, logs: Logs) -> None:
        self._tell((math.inf, END), lambda callback: callback.on_train_end(logs))

    def epoch_begin(self, epoch: int) -> None:
        self._tell((epoch, BEGIN), lambda callback: callback.on_epoch_begin(epoch, {}))

    def epoch_end(self, epoch: int, logs: Logs) -> None:
        self._tell((epoch, END), lambda callback: callback.on_epoch_end(epoch, logs))

    def _tell(self, event: Event, tell: Callable[[Any], object]) -> None:
        """Tell an event to the callbacks that have not heard it yet."""
        if event != self._event:
            self._event, self._heard, self._before = event, set(), {}
        for at, callback in enumerate(self._all):
            if at not in self._heard:
                if self._keeps and at in self._collective and event[0] >= 0:
                    self._prepare(at)
                tell(callback)
                self._heard.add(at)

    def _prepare(self, at: int) -> None:
        """Give a callback the attributes that it had before it heard this event for the first time."""
        held = vars(self._all[at])
        if at in self._before:
            held.clear()
            held.update(self._before[at])
        self._before[at] = {name: copy(value) if _changes(value) else value for name, value in held.items()}

    def heard(self) -> tuple[Event, list[int]]:
        """The last event, and which of the callbacks that communicate have heard it, by their order among these."""
        return self._event, [order for order, at in enumerate(self._collective) if at in self._heard]

    def tell_again(self, sides: Iterable[tuple[Event, list[int]]]) -> None:
        """Callbacks that communicate hear an event again when a rank has not heard it. sides: `heard` of all ranks."""
        for event, heard in sides:
            if event < self._event:
                self._heard -= set(self._collective)
            elif event == self._event:
                self._heard -= {at for order, at in enumerate(self._collective) if order not in heard}

    def ranks_change(self) -> None:
        for callback in self._all:
            if hasattr(callback, "on_ranks_change"):
                callback.on_ranks_change()

    def state(self) -> dict[str, np.ndarray]:
        """The state of all callbacks, by their kind, and by their number among the callbacks of that kind."""
        return {
            f"{prefix}{name}": np.asarray(value)
            for prefix, callback in self._named()
            for name, value in callback.state().items()
        }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Hand out what `state` returned."""
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

    def between_steps(self, epoch: int, batch: int) -> None:
        for callback in self._between_steps:
            callback.between_steps(epoch, batch)

    def unusable(self, gradients: Any) -> bool:
        return any(callback.unusable(gradients) for callback in self._unusable)

    def let_go(self) -> None:
        """The fit is over: the callbacks let go of its trainer and memory. Local."""
        for callback in self._all:
            if hasattr(callback, "set_trainer"):
                callback.set_trainer(None)


def _agrees(callback: Callback) -> bool:
    """Whether before_update returns the same on all ranks. An inherited `agrees` says nothing of an overridden one."""
    kinds = [vars(callback), *map(vars, type(callback).__mro__)]
    places = [next(at for at, own in enumerate(kinds) if name in own) for name in ("agrees", "before_update")]
    return callback.agrees and places[0] <= places[1]


def _changes(value: Any) -> bool:
    """Whether a value is one that callbacks change in place; arrays they replace."""
    return isinstance(value, list | dict | set)


def _overrides(callback: Any, event: str) -> bool:
    """Whether a callback has an event of its own: of its class, or set on the instance."""
    own = getattr(callback, event, getattr(Callback, event))
    return getattr(own, "__func__", own) is not getattr(Callback, event)
