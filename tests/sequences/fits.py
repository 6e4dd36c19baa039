"""The fits of a sequence: their arguments, the incidents in them, and the step after which they must end."""

import copy
import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.sequences.models import CLASSES, FEATURES
from trainers import Loader
from trainers.callbacks import Callback
from trainers.data import OF_SAMPLES, order
from trainers.errors import DataError, DivergedError, NotFiniteError
from trainers.fit.checkpointing import Checkpoint
from trainers.recovery.terminating import Terminated

EVENTS = ("train_begin", "epoch_begin", "batch_begin", "batch_end", "epoch_end", "train_end")


class WantedError(Exception):
    """An error that a callback raises on purpose."""


class Rows:
    """A data set by rows. bad: a row that can't be read."""

    def __init__(self, x: np.ndarray, y: np.ndarray, bad: int | None = None) -> None:
        self.x, self.y, self.bad = x, y, bad

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[np.ndarray, Any]:
        if not isinstance(row, int):
            raise TypeError("one row")
        if row == self.bad:
            raise OSError("no such row")
        return self.x[row], self.y[row]


class ManyRows(Rows):
    """A data set that returns several rows at once."""

    def __getitems__(self, rows: list[int]) -> list[tuple[np.ndarray, Any]]:
        return [self[row] for row in rows]


def pairs(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([x for x, _ in rows]), np.array([y for _, y in rows])


@dataclass
class Incident:
    """An action of one rank's callback at one event: it raises, stops the training, or sends itself SIGTERM."""

    kind: str
    event: str
    epoch: int
    step: int
    rank: int

    @property
    def error(self) -> type[BaseException] | None:
        return {"raise": WantedError, "stop": None, "SIGTERM": Terminated}[self.kind]

    def limit(self, steps: int, epochs: int) -> int | None:
        """Return the number of steps after which the fit ends, if ranks take steps together; None if the incident does
        not happen."""
        epoch, step, stops = self.epoch, self.step, self.kind != "raise"
        if self.event == "train_begin":
            return 0
        if self.event == "train_end":
            return epochs * steps
        if epoch >= epochs:
            return None
        places = {"epoch_begin": 0, "batch_begin": step, "batch_end": step + 1, "epoch_end": steps}
        if stops and self.event != "epoch_end":  # the flag travels with the next step
            return epoch * steps + min(places[self.event] + 1, steps)
        return epoch * steps + places[self.event]

    def heard(self, steps: int, epochs: int, first: int) -> "Incident":
        """Return the stop that a signal causes: callbacks look for the signal at the event after the one in which it
        came."""
        event, epoch, step = self.event, self.epoch, self.step
        if event == "train_begin":
            event, epoch, step = "batch_end", first // steps, first % steps
        elif event == "epoch_begin":
            event, step = "batch_end", first % steps if epoch == first // steps else 0
        elif event == "batch_begin":
            event = "batch_end"
        elif event == "batch_end":
            event, step = ("batch_end", step + 1) if step + 1 < steps else ("epoch_end", step)
        elif event == "epoch_end":
            event, epoch, step = "batch_end", epoch + 1, 0
        if epoch >= epochs:
            event = "train_end"
        return Incident(self.kind, event, epoch, step, self.rank)

    def comes(self, steps: int, first: int) -> bool:
        """Whether the incident happens in a fit that resumes after `first` of its steps."""
        if self.event.startswith("train"):
            return True
        if self.event.startswith("epoch"):
            return self.epoch >= first // steps
        return self.epoch * steps + self.step >= first


class Does(Callback):
    """A callback that does an incident."""

    def __init__(self, incident: Incident) -> None:
        self.incident, self.happened, self._epoch = incident, False, -1

    def _meet(self, event: str, step: int | None = None) -> None:
        incident = self.incident
        if event != incident.event or (step is not None and step != incident.step):
            return
        if not event.startswith("train") and self._epoch != incident.epoch:
            return
        self.happened = True
        if incident.kind == "stop":
            self.trainer.stop_training = True
        elif incident.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise WantedError("as the sequence wants it")

    def on_train_begin(self, logs: Any = None) -> None:
        self._meet("train_begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._meet("epoch_begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._meet("batch_begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._meet("batch_end", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._meet("epoch_end")

    def on_train_end(self, logs: Any = None) -> None:
        self._meet("train_end")


class Evaluates(Callback):
    """A callback that calls the trainer in an event, on all ranks."""

    collective = True

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self._x, self._y = x, y

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.evaluate(self._x, self._y)
        self.trainer.predict(self._x)


@dataclass
class Fit:
    """A fit of a sequence. bad: a row that can't be read or, if `poisoned`, is not finite; a callback may check for
    that (`finds`: "raise", "skip" or ""). halves: a callback halves the learning rate in each epoch. restores: the
    model of the best epoch is restored."""

    x: np.ndarray
    y: np.ndarray
    epochs: int
    batch_size: int
    seed: int
    shuffle: bool
    form: str
    prefetch: bool | None = None
    validates: str = ""
    progress: bool = False
    incident: Incident | None = None
    bad: int | None = None
    poisoned: bool = False
    finds: str = ""
    halves: bool = False
    restores: bool = False
    checkpoint: Checkpoint | None = None
    resume: bool = False
    callbacks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        self.batch_size = min(self.batch_size, self.rows)
        self.steps = -(-self.rows // self.batch_size)
        self.held = self.x[:3], self.y[:3]
        if self.poisoned and self.bad is not None:
            self.x = self.x.astype("float32")
            self.x[self.bad, 1] = np.nan

    @property
    def skips(self) -> bool:
        return self.poisoned and self.finds == "skip"

    def bad_place(self, epoch: int) -> int | None:
        """Return the step of an epoch in which the bad row is."""
        if self.bad is None:
            return None
        return order(self.rows, self.seed, epoch, self.shuffle).tolist().index(self.bad) // self.batch_size

    @property
    def refuses_checkpoints(self) -> bool:
        """Whether the fit fails before it begins: for its checkpoints it samples rows, one of which can't be read."""
        sampled = np.linspace(0, self.rows - 1, min(self.rows, OF_SAMPLES)).astype(int)
        return self.checkpoint is not None and not self.poisoned and self.bad in sampled

    def limit(self, first: int = 0) -> tuple[int, type[BaseException] | None]:
        """Return the number of steps after which the fit ends, and its error, if ranks take steps together. first:
        steps that were done before."""
        last = self.epochs * self.steps
        limit, error = max(first, last), None
        incident = self.incident
        if first >= last:  # nothing is left, or there was nothing
            alone = incident is not None and incident.event.startswith("train")
            return first, incident.error if incident is not None and alone else None
        if incident is not None and incident.comes(self.steps, first) and incident.epoch < self.epochs:
            if incident.kind == "SIGTERM":
                incident = incident.heard(self.steps, self.epochs, first)
            at = incident.limit(self.steps, self.epochs)
            if at is not None:
                begun = incident.event == "epoch_begin" and incident.epoch * self.steps < first
                limit, error = max(at, first), incident.error
                if begun and incident.kind != "raise":
                    limit = first + 1
        for epoch in range(first // self.steps, self.epochs if not self.skips else 0):
            place = self.bad_place(epoch)
            at = epoch * self.steps + (place or 0)
            if place is not None and first <= at < limit:
                if not self.poisoned:
                    return at, DataError
                return (at, NotFiniteError) if self.finds else (at + 1, DivergedError)
        return limit, error

    def settings(self) -> list[Any]:
        return [self.rows, self.batch_size, self.seed, self.shuffle]

    def data(self, folder: str, rank: int) -> Loader:
        """Return the data of the fit."""
        x, y, bad = self.x, self.y, None if self.poisoned else self.bad
        collate: Any = None
        rows: Any = (x, y)
        if self.form == "memmap":
            path = os.path.join(folder, f"rows.{rank}.npy")
            np.save(path, x)
            rows = np.load(path, mmap_mode="r"), y
        elif self.form == "rows":
            rows = Rows(x, y, bad)
        elif self.form == "many rows":
            rows = ManyRows(x, y, bad)
        elif self.form == "collate":
            rows, collate = Rows(x, y, bad), pairs
        elif self.form == "list":
            rows = list(zip(x, y, strict=True))
        return Loader(rows, collate=collate, prefetch=self.prefetch)

    def kept(self, together: bool, first: int, limit: int, error: Any) -> list[int]:
        """Return the steps after which checkpoints must exist. together: whether ranks take steps together."""
        if self.checkpoint is None:
            return []
        count, _, unit = self.checkpoint.every.rpartition(" ")
        number, steps, newest, due = int(count or 1), self.steps, first, []
        for total in range(first + 1, limit + 1):
            epoch, step = divmod(total, steps)
            if step:
                written = together and unit == "steps" and total // number > newest // number
                written |= together and total == limit and error in (None, Terminated)
            elif total < limit or self._ends_epoch(error):
                written = unit == "steps" and total // number > newest // number
                written |= unit.startswith("epoch") and epoch % number == 0
                written |= epoch == self.epochs or (total == limit and error in (None, Terminated))
            else:
                written = False
            if written:
                due.append(total)
                newest = total
        return due

    def _ends_epoch(self, error: Any) -> bool:
        """Whether the last epoch of the fit is complete."""
        if error is not WantedError or self.incident is None:
            return error not in (DivergedError,)
        event, step = self.incident.event, self.incident.step
        return event in ("train_end", "epoch_begin") or (event == "batch_begin" and step == 0)

    def __str__(self) -> str:
        hidden = "x", "y", "held", "callbacks"
        shown = {name: value for name, value in vars(self).items() if name not in hidden and value not in (None, "")}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not False)


def draw_fit(draw: random.Random, ranks: int) -> Fit:
    """Draw a fit."""
    rows = draw.choice([1, 2, 5, 13, 30])
    numbers = np.random.default_rng(draw.randrange(5))
    dtype = draw.choice(["float32", "float32", "float64", "int32"])
    x = (numbers.normal(size=(rows, FEATURES)) * (3 if dtype == "int32" else 1)).astype(dtype)
    y = np.abs(np.asarray(x, "float32")[:, :CLASSES]).argmax(1)
    epochs = draw.choice([0, 1, 1, 2, 3])
    call = Fit(
        x, y, epochs,
        batch_size=draw.choice([1, 2, 4, 10, 50]),
        seed=draw.randrange(3),
        shuffle=draw.random() < 0.8,
        form=draw.choice(["arrays", "arrays", "rows", "many rows", "memmap", "collate", "list"]),
        prefetch=draw.choice([None, None, True, False]),
        validates=draw.choice(["", "", "arrays", "rows"]),
        progress=draw.random() < 0.2,
        halves=draw.random() < 0.15,
        restores=draw.random() < 0.1,
    )  # fmt: skip
    what = draw.random()
    if what < 0.35:
        kind, event = draw.choice(["stop", "raise", "SIGTERM"]), draw.choice(EVENTS)
        epoch, step = draw.randrange(max(1, epochs)), draw.randrange(call.steps)
        if kind == "SIGTERM" and event == "train_end":  # nobody looks for it any more: it ends the program
            event = "batch_end"
        call.incident = Incident(kind, event, epoch, step, draw.randrange(ranks))
    elif what < 0.5 and rows > 2:
        bad, poisoned = draw.randrange(1, rows - 1), draw.random() < 0.5
        if poisoned:
            call = copy.copy(call)
            call.bad, call.poisoned, call.finds = bad, True, draw.choice(["", "raise", "skip"])
            call.validates, call.restores = "", False
            call.__post_init__()
        elif call.form in ("rows", "many rows", "collate"):
            call.bad = bad
    return call
