"""The checkpoints of one fit: collected from all ranks, written by rank 0 beside the training, and gone on from."""

import itertools
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from allreduce.transport.chunked import bytes_of_root, bytes_to_root
from allreduce.transport.control import known, root_value, together
from trainers import data
from trainers.data import Batches, Fingerprint
from trainers.errors import ArgumentError, CheckpointError, ModelFileError, UnusableError
from trainers.files import checkpoint as files
from trainers.files import model_file
from trainers.files.checkpoint import Progress, Saved
from trainers.replica import Replica
from trainers.state import checkpoints
from trainers.state.adopt import RATES, adopt_whole
from trainers.state.checkpoints import Checkpoint, period
from trainers.strategies.interface import Strategy
from trainers.watching.callback import Callbacks
from trainers.watching.history import VALIDATED, VALIDATION, Epoch, History

log = logging.getLogger("trainers")

REPLICA, WATCHING = "replica.", "watching."  # what of a rank's own state is its replica's, and its callbacks'


class Saver:
    """Writes the checkpoints of a fit, and finds the one that it goes on from.

    batches: of the fit. resume: whether to go on from the newest.
    known: names in its history, of which `checkpoint.best` must be one.

    Raises ArgumentError, on this rank.
    """

    def __init__(
        self, strategy: Strategy, batches: Batches, checkpoint: Checkpoint, resume: bool, known: Collection[str]
    ) -> None:
        self._strategy, self._group = strategy, strategy.group
        self._folder, self._keep = os.path.abspath(checkpoint.folder), checkpoint.keep
        self._resumes = resume
        self._count, self._unit = period(checkpoint.every)
        self._watched = VALIDATED + checkpoint.best[4:] if checkpoint.best.startswith(VALIDATION) else checkpoint.best
        self._sign = 1 if checkpoint.lowest_is_best else -1
        self._settings, self._steps = batches.settings, batches.steps
        self._data, self._same_data = _fingerprint(batches, strategy.replica), checkpoint.same_data
        self._writer = ThreadPoolExecutor(1, "writes checkpoints")
        self._writing: Future[None] | None = None  # the last work of the writer, until somebody has heard of its end
        self._held = ExitStack()
        self.watching: dict[str, np.ndarray] = {}  # what a checkpoint has of this rank's callbacks
        self._memory: dict[str, np.ndarray] = {}  # rank 0's copy of the state, which the writer reads
        self._choices: dict[str, str] = {}
        self._written = 0  # steps before the last checkpoint
        self._since = time.monotonic()
        self._saving = self._overdue = False  # one is collected; one was not written, since a rank was lost
        self._is_mine = False  # rank 0: whether the folder is taken
        if self._watched and self._watched not in known:
            raise ArgumentError(
                f"Checkpoint(best={checkpoint.best!r}): this fit measures {', '.join(known)}"
                + ("" if any(name.startswith(VALIDATED) for name in known) else "; it has no validation_data")
            )

    @property
    def _chief(self) -> bool:
        return self._group.rank == 0

    # Where the training begins

    def open(self) -> tuple[str, Progress, np.ndarray] | None:
        """Find out whether checkpoints can be written, and take on the newest when there is one. Collective.

        Returns its path, how far it is, and the values of the steps of its unfinished epoch; None where there is
        none, and the training begins from the beginning. Raises CheckpointError on all ranks, before anything is
        changed.
        """
        comm = self._group.comm
        self._choices = self._strategy.choices()
        resumed = self._take_newest(self._look)
        self._strategy.snapshot(self._memory)  # takes the memory now, and shows that the state can be collected
        together(comm, self._check_room)
        return resumed

    def go_back(self) -> tuple[str, Progress, np.ndarray] | None:
        """As `open`, in the middle of a fit: take on the newest checkpoint, since the state is lost. Collective."""
        self._end_writing()
        return self._take_newest(lambda: files.newest(self._folder))

    def _take_newest(self, look: Callable[[], tuple[str, Saved] | None]) -> tuple[str, Progress, np.ndarray] | None:
        comm = self._group.comm
        found = together(comm, lambda: look() if self._chief else None)
        told = found and [found[0], asdict(found[1].progress), found[1].measured.tolist()]
        told = root_value(comm, told, "hear of the newest checkpoint")
        if told is None:
            return None
        progress = Progress(**told[1])
        self._take_on(None if found is None else found[1], progress)
        self._written = progress.total
        return told[0], progress, np.array(told[2])

    def _look(self) -> tuple[str, Saved] | None:
        """The newest checkpoint, if the training may go on from it. On rank 0."""
        self._take_folder()
        return files.newest(self._folder, self._check)

    def _check(self, path: str, saved: Saved) -> None:
        """Raise CheckpointError unless the training may go on from a checkpoint. On rank 0."""
        if not self._resumes:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of another training, the newest of {saved.progress}; go on from "
                "it with resume=True (--resume), or give another folder"
            )
        check(path, saved, self._strategy.replica, self._settings, self._steps)
        progress, strategy = saved.progress, self._strategy
        differs = data.difference(progress.settings.get("data"), self._data, self._settings["rows"])
        if differs and self._same_data:
            raise CheckpointError(
                f"{path} is of a training with other data: {differs}; give the same rows in the same order, or go on "
                "with these on purpose: checkpoint=Checkpoint(folder, same_data=False), --other-data"
            )
        if progress.step and not strategy.synchronous:
            text = f"{path} is of the middle of an epoch, and {strategy.name} goes on from the end of one"
            raise UnusableError(text)
        before, now = (choices.get("allreduce") for choices in (progress.choices, self._choices))
        if before != now:
            chosen = f"{before} before, and by {now} now"
            log.warning("trainers: gradients were averaged by %s: the last bits may differ", chosen)
        if progress.ranks != self._group.size:
            text = f"{progress.ranks} ranks, and this training has {self._group.size}"
            log.warning("trainers: %s was written on %s: the last bits may differ, and random states do", path, text)

    def _take_folder(self) -> None:
        """Make the folder where it is missing, clean it of what killed writers have left, and keep it until `close`.

        Raises CheckpointError.
        """
        folder = self._folder
        try:
            os.makedirs(folder, exist_ok=True)
            self._held.enter_context(files.in_use(folder))
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"room?")
            files.clean(folder)
        except OSError as error:
            reason = f"{error.strerror or error}; give a folder that can be written to"
            raise CheckpointError(f"checkpoints can't be written to {folder}: {reason}") from error
        self._is_mine = True

    def side(self) -> dict[str, Any]:
        """What this rank tells the others when a rank was lost. Local."""
        return {"mine": self._is_mine, "saving": self._saving, "written": self._written}

    def rejoin(self, sides: list[dict[str, Any]]) -> None:
        """The ranks are others, and rank 0 may be a new one. sides: all ranks' `side`. Collective."""
        self._written = max(side["written"] for side in sides)
        self._overdue |= not sides[0]["mine"] or any(side["saving"] for side in sides)
        self._saving = False
        self._choices = self._strategy.choices()
        together(self._group.comm, lambda: self._take_folder() if self._chief and not self._is_mine else None)

    def _check_room(self) -> None:
        needed = sum(array.nbytes for array in self._memory.values())
        if self._chief and (free := shutil.disk_usage(self._folder).free) < needed:
            raise CheckpointError(
                f"checkpoints can't be written to {self._folder}: one takes {needed:,} bytes, and {free:,} are free"
            )

    def _take_on(self, saved: Saved | None, progress: Progress) -> None:
        """Give all ranks the state of a checkpoint, which rank 0 has read. Collective."""
        comm = self._group.comm
        state = None if saved is None else saved.state | {RATES: np.array(progress.rates)}
        try:
            adopt_whole(self._strategy, state)
        except ModelFileError as error:  # on all ranks
            text = f"the checkpoint in {self._folder} is of another model: {error}"
            raise known(CheckpointError(text), comm) from error
        same = progress.ranks == self._group.size
        packed = together(comm, lambda: [] if saved is None else self._packed(saved, same))
        mine = model_file.unpacked(bytes_of_root(comm, packed, "hear what a checkpoint has of each rank"))
        self.watching = _taken(mine, WATCHING)
        if same:  # or else what is each rank's own can't be that of other ranks
            together(comm, lambda: self._take_own(_taken(mine, REPLICA), mine))

    def _take_own(self, local: dict[str, np.ndarray], own: dict[str, np.ndarray]) -> None:
        """Take on the replica's `local` state of this rank, and the random numbers of its programs in `own`. Local."""
        try:
            self._strategy.replica.load_local_state(local)
            checkpoints.load(own)
        except (ModelFileError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            text = f"the checkpoint in {self._folder} is damaged, or of another model"
            raise CheckpointError(f"{text}: a rank can't go on with what is its own: {error!r}") from error

    def _packed(self, saved: Saved, same: bool) -> list[bytes]:
        """For each rank what was its own; on another number of ranks, what was rank 0's, for their callbacks."""
        if same:
            return [model_file.packed(local) for local in saved.local]
        return [model_file.packed(saved.local[0])] * self._group.size

    # While it goes on

    def wants(self) -> bool:
        """Whether this rank says that it is time, by the clock; only rank 0 ever does. Local."""
        late = self._unit == "seconds" and time.monotonic() - self._since >= self._count
        return self._chief and (late or self._overdue)

    def due(self, total: int, asked: bool) -> bool:
        """Whether a checkpoint is to be written after `total` steps. asked: by a rank's `wants`. Local."""
        return asked or (self._unit == "steps" and total // self._count > self._written // self._count)

    def due_after(self, epochs: int) -> bool:
        """Whether a checkpoint is to be written after so many epochs. Collective."""
        if self._overdue:  # on all ranks
            return True
        if self._unit == "epochs":
            return epochs % self._count == 0
        asked = self._unit == "seconds"
        if asked:
            asked = root_value(self._group.comm, self.wants(), "hear whether it is time for a checkpoint")
        return self.due(epochs * self._steps, asked)

    def is_best(self, history: History) -> bool:
        """Whether the last epoch is the best so far. Local, the same on all ranks."""
        epochs = [epoch.as_dict() for epoch in history] if self._watched else []
        values = [self._sign * epoch[self._watched] for epoch in epochs if self._watched in epoch]
        return bool(values) and values[-1] < min((value for value in values[:-1] if value == value), default=math.inf)

    def save(self, progress: Progress, callbacks: Callbacks, measured: np.ndarray, best: bool = False) -> None:
        """Have a copy of everything written while the training goes on. Collective.

        callbacks: this rank's. measured: the values of the steps of an unfinished epoch.
        What the checkpoint before has met, a full disk say, is raised here, on all ranks.
        """
        self._saving = True
        packed, watching = together(self._group.comm, partial(self._own, callbacks))
        state = self._strategy.snapshot(self._memory)
        everyone = bytes_to_root(self._group.comm, packed, "collect what each rank has of a checkpoint")
        self._written, self._since = progress.total, time.monotonic()

        def start() -> None:
            replica = self._strategy.replica
            local = [model_file.unpacked(each) for each in everyone]
            local[0] |= watching  # which may be large, and does not change
            saved = Saved(type(replica).__name__, replica.config(), state, progress, local, measured)
            self._writing = self._writer.submit(self._write, saved, best)

        together(self._group.comm, lambda: start() if self._chief else None)
        self._saving = self._overdue = False

    def progress(self, history: History, epoch: int, step: int = 0, seconds: float = 0.0) -> Progress:
        """How far the training is. Local."""
        return Progress(
            epoch=epoch,
            step=step,
            total=epoch * self._steps + step,
            ranks=self._group.size,
            seconds=seconds,
            settings=self._settings | {"data": self._data},
            shapes=[[name, list(shape)] for name, shape in self._strategy.replica.shapes().items()],
            choices=self._choices,
            rates=self._strategy.replica.learning_rates,
            history=[each.as_dict() for each in history],
        )

    def _own(self, callbacks: Callbacks) -> tuple[bytes, dict[str, np.ndarray]]:
        """What belongs to this rank alone, for a message, and what to its callbacks; the chief's stays out of it."""
        self.finish()
        own = {f"{REPLICA}{name}": array for name, array in self._strategy.replica.local_state().items()}
        watching = {f"{WATCHING}{name}": array for name, array in callbacks.state().items()}
        own |= checkpoints.take()
        return model_file.packed(own if self._chief else own | watching), watching

    def _write(self, saved: Saved, best: bool) -> None:
        """Write a checkpoint, and remove those that it makes superfluous. In the writer's thread."""
        path = files.path_of(self._folder, saved.progress.total)
        files.write(path, saved)
        if best:
            files.keep_as_best(path)
        files.prune(self._folder, saved.progress.total, self._keep)

    def check(self) -> None:
        """Raise what the writing has met so far, on this rank. Local."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until all is on the disk. Raises CheckpointError, on this rank. Local."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _end_writing(self) -> None:
        """Wait until all is on the disk; an error is logged, since something else ends the fit. Local."""
        try:
            self.finish()
        except Exception as error:
            log.error("trainers: %s", error)

    def close(self) -> None:
        """Wait until all is on the disk, and give the folder back; an error is logged. Local."""
        self._end_writing()
        self._writer.shutdown()
        self._memory.clear()
        self._held.close()
        self._is_mine = False


def _taken(own: dict[str, np.ndarray], whose: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `whose`, which is taken off."""
    return {name.removeprefix(whose): array for name, array in own.items() if name.startswith(whose)}


def _fingerprint(batches: Batches, replica: Replica) -> Fingerprint:
    """The fingerprint of the data. Leaves the random generators as they were. Raises DataError. Local."""
    programs, own = checkpoints.take(), replica.local_state()
    try:
        return batches.fingerprint()
    finally:
        checkpoints.load(programs)
        replica.load_local_state(own)


def make_saver(
    strategy: Strategy, batches: Batches, checkpoint: Checkpoint | str | None, resume: bool, validates: bool
) -> Saver | None:
    """What `fit` was asked for. Raises ArgumentError, on this rank."""
    if checkpoint is None:
        if resume:
            raise ArgumentError("resume=True goes on from a checkpoint: give the folder of them, checkpoint=...")
        return None
    known = strategy.replica.metrics
    known += tuple(f"{VALIDATED}{name}" for name in known if validates)
    given = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    return Saver(strategy, batches, given, resume, known)


def check(path: str, saved: Saved, replica: Replica, settings: dict[str, Any], steps: int) -> None:
    """Refuse a checkpoint that is no earlier state of this training. Raises CheckpointError.

    settings: that must be the same. steps: of an epoch.
    Raises UnusableError where an older checkpoint may do: this one is damaged.
    """
    progress = saved.progress
    if saved.kind != type(replica).__name__:
        kinds = f"of a {saved.kind}, and this one is a {type(replica).__name__}"
        raise CheckpointError(f"{path} is of another model: {kinds}")
    try:
        [Epoch.of_dict(each) for each in progress.history]
        there = [_described(*each) for each in progress.shapes]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnusableError(f"{path} is damaged: its history or its shapes can't be read: {error!r}") from error
    here = [_described(name, shape) for name, shape in replica.shapes().items()]
    for saved_one, own in itertools.zip_longest(there, here, fillvalue="no more parameters"):
        if saved_one != own:
            raise CheckpointError(f"{path} is of another model: it has {saved_one} where this one has {own}")
    try:
        replica.check_config(path, saved.config)
    except ModelFileError as error:
        raise CheckpointError(str(error)) from error
    for name, value in settings.items():
        if progress.settings.get(name) != value:
            values = f"{name}={progress.settings.get(name)!r}, and this one has {name}={value!r}"
            raise CheckpointError(f"{path} is of a training with {values}; give the same to go on from it")
    if len(progress.rates) != len(replica.learning_rates):
        counts = f"{len(progress.rates)} learning rates, and this one has {len(replica.learning_rates)}"
        raise CheckpointError(f"{path} is of a training with {counts}")
    if progress.step > steps or (progress.step and len(saved.measured[0]) != len(replica.metrics)):
        raise UnusableError(f"{path} is damaged: step {progress.step} of {steps}")


def _described(name: str, shape: Any) -> str:
    return f"{name} of shape {tuple(shape)}"
