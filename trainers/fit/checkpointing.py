"""The checkpoints of a fit: the user's options (Checkpoint); collects them from all ranks, writes them in a thread of
rank 0, and resumes from them (Saver)."""

import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from allreduce.errors import OptionError
from allreduce.transport.chunked import bytes_of_root, bytes_to_root
from allreduce.transport.control import on_all_ranks, root_value, together
from trainers import data
from trainers.arguments import FLAG, integer, require
from trainers.data import BatchSource
from trainers.datasets.columns import Columns
from trainers.errors import ArgumentError, CheckpointError, ModelFileError, UnusableError
from trainers.files import checkpoint as files
from trainers.files import model_file
from trainers.files.checkpoint import Progress, Saved
from trainers.files.values import decode, encode
from trainers.replica import Replica, check_config, columns_of, saved_config
from trainers.state.adopt import RATES, adopt_whole
from trainers.state.owners import INNER
from trainers.strategies.interface import Strategy
from trainers.watching.callback import Callbacks
from trainers.watching.history import Epoch

log = logging.getLogger("trainers")

NOTATION = re.compile(r"(?:(\d+(?:\.\d+)?)\s*)?([a-z]+)")
UNITS = {"step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs"}
SECONDS = {
    "s": 1, "second": 1, "seconds": 1, "min": 60, "minute": 60, "minutes": 60, "h": 3600, "hour": 3600, "hours": 3600,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Options of a fit's checkpoints. Raises ArgumentError.

    folder: a folder for this training alone; created if missing. Only rank 0 uses it, and needs memory for a copy of
        the state.
    every: "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes", "2 hours". A checkpoint is also written at the
        end of the training, and when a callback stops it.
    keep: how many of the newest checkpoints stay.
    same_data: whether a resumed training must have the same data, as far as their text tells: the shapes and dtypes,
        and the first and the last row of arrays. False: other rows are accepted, as many as before, and divided loaders
        on another number of ranks.

    Random numbers that a data set or a loader draws continue exactly only with prefetch=False.
    """

    folder: str
    every: str = "epoch"
    keep: int = 3
    same_data: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder) or "\0" in str(self.folder):
            raise ArgumentError(f"Checkpoint({self.folder!r}): give the name of a folder")
        object.__setattr__(self, "folder", os.fspath(self.folder))
        period(self.every)
        require(integer(1).error("Checkpoint: keep", self.keep), FLAG.error("Checkpoint: same_data", self.same_data))


def period(every: str) -> tuple[float, str]:
    """Parse `every` into (count, unit); unit is "steps", "epochs" or "seconds". Raises ArgumentError."""
    match = NOTATION.fullmatch(every.strip().lower()) if isinstance(every, str) else None
    count, word = (float(match[1] or 1), match[2]) if match else (0.0, "")
    if word in SECONDS and 0 < count < math.inf:
        return count * SECONDS[word], "seconds"
    if word in UNITS and count >= 1 and count.is_integer():
        return count, UNITS[word]
    raise ArgumentError(
        f'every={every!r} is not a period: use "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes", "2 hours"'
    )


# prefixes of a rank's own arrays: of its replica, of the strategy, of its callbacks, and of its loader
REPLICA, STRATEGY, WATCHING, LOADER = "replica.", "strategy.", "watching.", "loader."


class Saver:
    """Writes the checkpoints of a fit, and loads the one from which it resumes.

    batches: of the fit. resume: whether to resume from the newest checkpoint in the folder.
    """

    def __init__(self, strategy: Strategy, batches: BatchSource, checkpoint: Checkpoint, resume: bool) -> None:
        self._strategy, self._group = strategy, strategy.group
        self._folder, self._keep = os.path.abspath(checkpoint.folder), checkpoint.keep
        self._resumes = resume
        self._count, self._unit = period(checkpoint.every)
        self._batches, self._settings, self._data = batches, batches.settings, str(batches)
        self._same_data = checkpoint.same_data
        self._writer = ThreadPoolExecutor(1, "writes checkpoints")
        self._writing: Future[None] | None = None  # the last write, until `finish` has taken its result
        self._folder_lock = ExitStack()
        # of this rank, in the checkpoint that was loaded: the state of its callbacks, and the place in its loader
        self.watching: dict[str, np.ndarray] = {}
        self.loader: dict[str, np.ndarray] = {}
        self._memory: dict[str, np.ndarray] = {}  # rank 0's copy of the state, which the writer reads
        self._written = 0  # number of steps at the last checkpoint
        self._since = time.monotonic()
        self._overdue = False  # whether one is due at the next step, because a rank has failed; on all ranks
        self._has_lock = False  # whether this rank, rank 0, has locked the folder

    @property
    def _chief(self) -> bool:
        return self._group.rank == 0

    # Where the training begins

    def open(self) -> tuple[str, Progress] | None:
        """Check that checkpoints can be written, and load the newest one, if there is one. Collective.

        Returns its path, known on rank 0, and its progress; None if there is no checkpoint. Raises CheckpointError on
        all ranks, before anything is changed.
        """
        resumed = self._load_newest(self._find_newest)
        # allocate the memory now, and test that the state can be collected
        self._strategy.owners.snapshot(self._memory, self._chief)
        return resumed

    def go_back(self) -> tuple[str, Progress] | None:
        """Load the newest checkpoint during a fit, because the state is lost. Returns as `open`. Collective."""
        self._end_writing()
        return self._load_newest(lambda: files.newest(self._folder))

    def _load_newest(self, find: Callable[[], tuple[str, Saved] | None]) -> tuple[str, Progress] | None:
        path, saved = together(self._group.comm, lambda: find() if self._chief else None) or ("", None)
        progress = self._load(saved)
        if progress is None:
            return None
        self._written = progress.total
        return path, progress

    def _find_newest(self) -> tuple[str, Saved] | None:
        """Return the newest checkpoint from which this training may resume, or None. On rank 0."""
        self._lock_folder()
        return files.newest(self._folder, self._check)

    def _check(self, path: str, saved: Saved) -> None:
        """Raise CheckpointError if the training may not resume from a checkpoint. On rank 0."""
        if not self._resumes:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of another training, the newest of {saved.progress}; resume "
                "from it (resume=True, --resume), or give another folder"
            )
        steps = math.inf if self._batches.streams else self._batches.steps
        check(path, saved, self._strategy.replica, self._settings, steps)
        progress, strategy = saved.progress, self._strategy
        before = progress.settings.get("data")
        if before != self._data and self._same_data:
            raise CheckpointError(
                f"{path} is of a training with other data, {before}, and this one has {self._data}; give the same rows "
                "in the same order, or train with these on purpose: checkpoint=Checkpoint(folder, same_data=False), "
                "--other-data"
            )
        ranks = self._group.size
        moved = progress.ranks != ranks and self._batches.depends_on_ranks(progress.step, progress.total)
        if moved and self._same_data:
            raise CheckpointError(
                f"{path} was written on {progress.ranks} ranks, in the middle of the loaders' rows; this training has "
                f"{ranks} ranks, whose loaders would give some rows again and leave others out: resume on "
                f"{progress.ranks} ranks, or do it on purpose: checkpoint=Checkpoint(folder, same_data=False)"
            )
        if progress.step and not strategy.synchronous:
            text = f"{path} is of the middle of an epoch, and a {strategy.name} resumes from the end of one"
            raise UnusableError(text)

    def _lock_folder(self) -> None:
        """Create the folder if it is missing, lock it until `close`, and remove temporary files of killed writers.

        Raises CheckpointError.
        """
        folder = self._folder
        try:
            os.makedirs(folder, exist_ok=True)
            self._folder_lock.enter_context(files.in_use(folder))
            files.clean(folder)
        except OSError as error:
            reason = f"{error.strerror or error}; give a folder that can be written to"
            raise CheckpointError(f"checkpoints can't be written to {folder}: {reason}") from error
        self._has_lock = True

    def rejoin(self) -> None:
        """Continue on new ranks after a failure; a checkpoint is due, because the failure may have prevented one. A new
        rank 0 locks the folder. Collective."""
        self._overdue = True
        together(self._group.comm, lambda: self._lock_folder() if self._chief and not self._has_lock else None)

    def _load(self, saved: Saved | None) -> Progress | None:
        """Load a checkpoint on all ranks; returns its progress, None if there is no checkpoint. Collective. saved: the
        checkpoint on rank 0, None elsewhere."""
        comm = self._group.comm
        state = None
        if saved is not None:
            new = {name: np.zeros_like(array) for name, array in self._strategy.owners.shared_state().items()}
            state = saved.state | new | saved.shared | {RATES: np.array(saved.progress.rates)} | saved.progress.pack()
        try:
            progress = adopt_whole(self._strategy, state)
        except ModelFileError as error:  # on all ranks
            text = f"the checkpoint in {self._folder} is of another model: {error}"
            raise on_all_ranks(CheckpointError(text), comm) from error
        if progress is None:
            return None
        same = progress.ranks == self._group.size
        packed = together(comm, lambda: [] if saved is None else self._packed(saved, same))
        own = model_file.unpack(bytes_of_root(comm, packed, "receive this rank's part of a checkpoint"))
        self.watching, self.loader = _with_prefix(own, WATCHING), _with_prefix(own, LOADER)
        together(comm, lambda: self._load_own(_with_prefix(own, REPLICA), own, same))
        return progress

    def _load_own(self, local: dict[str, np.ndarray], own: dict[str, np.ndarray], same: bool) -> None:
        """Load the strategy's own state, the replica's local state `local`, and the states of the global random
        generators in `own`. Local. same: False for another number of ranks, whose local and random states do not fit.
        """
        try:
            if self._strategy.allreduce is not None:
                self._strategy.allreduce.load_state(_with_prefix(own, STRATEGY))
            if same:
                inner = {name: array for name, array in local.items() if name.startswith(INNER)}
                self._strategy.owners.load_local_state(inner)
                self._strategy.replica.load_local_state({name: local[name] for name in local if name not in inner})
                load_random_state(own)
        except (OptionError, ModelFileError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            text = f"the checkpoint in {self._folder} is damaged, or of another model"
            raise CheckpointError(f"{text}: a rank can't load its own state: {error!r}") from error

    def _packed(self, saved: Saved, same: bool) -> list[bytes]:
        """Return the own arrays of every rank, packed. With another number of ranks, every rank gets rank 0's, from
        which its callbacks load their state. A loader's state that is good for all ranks comes from any rank that has
        one."""
        loaders = [{name: local[name] for name in local if name.startswith(LOADER)} for local in saved.local]
        alike = self._batches.streams and not self._batches.divided
        if alike:
            loaders = [loader or next(filter(None, loaders), {}) for loader in loaders]
        if same:
            return [model_file.pack(local | loader) for local, loader in zip(saved.local, loaders, strict=True)]
        first = {name: array for name, array in saved.local[0].items() if not name.startswith(LOADER)}
        return [model_file.pack(first | (loaders[0] if alike else {}))] * self._group.size

    # During the fit

    def is_time(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock, or overdue; False on other ranks. Local."""
        late = self._unit == "seconds" and time.monotonic() - self._since >= self._count
        return self._chief and (late or self._overdue)

    def due(self, total: int, asked: bool) -> bool:
        """Whether to write a checkpoint after `total` steps. asked: whether `is_time` of rank 0 was True. Local."""
        return asked or (self._unit == "steps" and total // self._count > self._written // self._count)

    def due_after(self, epochs: int) -> bool:
        """Whether to write a checkpoint after `epochs` epochs. Collective."""
        if self._overdue:
            return True
        if self._unit == "epochs":
            return epochs % self._count == 0
        asked = self._unit == "seconds"
        if asked:
            asked = root_value(self._group.comm, self.is_time(), "learn whether a checkpoint is due")
        return self.due(self._batches.total(epochs, 0), asked)

    def save(self, progress: Progress, callbacks: Callbacks) -> None:
        """Collect a checkpoint on rank 0, and start writing it in a thread. Collective.

        progress: the position, to which this adds the facts about the training. callbacks: this rank's.
        Raises the error of the previous checkpoint (a full disk, for example) on all ranks.
        """
        progress = self._described(progress)
        owners = self._strategy.owners
        packed, watching = together(self._group.comm, partial(self._finish_and_pack, callbacks, progress))
        with owners.whole():
            state, shared = owners.snapshot(self._memory, self._chief), owners.shared_state()
        gathered = bytes_to_root(self._group.comm, packed, "collect the ranks' parts of a checkpoint")
        self._written, self._since = progress.total, time.monotonic()

        def start() -> None:
            replica = self._strategy.replica
            local = [model_file.unpack(each) for each in gathered]
            local[0] |= watching  # not packed: it may be large, and does not change
            saved = Saved(type(replica).__name__, saved_config(replica), state, progress, local, shared)
            self._writing = self._writer.submit(self._write, saved)

        together(self._group.comm, lambda: start() if self._chief else None)
        self._overdue = False

    def _described(self, progress: Progress) -> Progress:
        """Return the progress with the facts about the training that a checkpoint has. Local."""
        return replace(
            progress,
            ranks=self._group.size,
            settings=self._settings | {"data": self._data, **progress.settings},
            shapes=[[name, list(shape)] for name, shape in self._strategy.replica.shapes.items()],
            rates=self._strategy.replica.learning_rates,
        )

    def _finish_and_pack(self, callbacks: Callbacks, progress: Progress) -> tuple[bytes, dict[str, np.ndarray]]:
        """Wait for the last write. Then return this rank's own arrays, packed for a message, and the arrays of its
        callbacks, which rank 0 does not pack. Local."""
        strategy = self._strategy
        self.finish()
        local = strategy.replica.local_state() | strategy.owners.local_state()
        own = {f"{REPLICA}{name}": array for name, array in local.items()}
        if strategy.allreduce is not None:
            own |= {f"{STRATEGY}{name}": array for name, array in strategy.allreduce.state().items()}
        _, place = self._batches.tell(progress.epoch, progress.step)
        own |= {f"{LOADER}{name}": array for name, array in place.items()}
        watching = {f"{WATCHING}{name}": array for name, array in callbacks.state().items()}
        own |= random_state()
        return model_file.pack(own if self._chief else own | watching), watching

    def _write(self, saved: Saved) -> None:
        """Write a checkpoint, and remove the oldest ones. In the writer's thread."""
        path = files.path_of(self._folder, saved.progress.total)
        files.write(path, saved)
        files.prune(self._folder, saved.progress.total, self._keep)

    def check(self) -> None:
        """Raise the error of the last write, if it has ended in one; do not wait for it. On this rank. Local."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Raises its CheckpointError, on this rank. Local."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _end_writing(self) -> None:
        """Wait for the last write; log its error, because another error already ends the fit. Local."""
        try:
            self.finish()
        except Exception as error:
            log.error("trainers: %s", error)

    def close(self) -> None:
        """Wait for the last write, and unlock the folder; log an error of the write. Local."""
        self._end_writing()
        self._writer.shutdown()
        self._memory.clear()
        self._folder_lock.close()
        self._has_lock = False


def _with_prefix(own: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with `prefix`, which is removed."""
    return {name.removeprefix(prefix): array for name, array in own.items() if name.startswith(prefix)}


def make_saver(
    strategy: Strategy, batches: BatchSource, checkpoint: Checkpoint | str | None, resume: bool
) -> Saver | None:
    """Create the Saver for the arguments of `fit`; None without a checkpoint. Raises ArgumentError, on this rank."""
    if checkpoint is None:
        if resume:
            raise ArgumentError("resume=True needs the folder of the checkpoints: give checkpoint=...")
        return None
    given = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    return Saver(strategy, batches, given, resume)


def check(path: str, saved: Saved, replica: Replica, settings: dict[str, Any], steps: float) -> None:
    """Raise CheckpointError if a checkpoint is not an earlier state of this training.

    settings: must equal the settings in the checkpoint. steps: the number of steps in an epoch; infinity if it is not
        known.
    Raises UnusableError if the checkpoint is damaged, so that an older one may be usable.
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
    here = [_described(name, shape) for name, shape in replica.shapes.items()]
    for saved_one, own in itertools.zip_longest(there, here, fillvalue="no more parameters"):
        if saved_one != own:
            raise CheckpointError(f"{path} is of another model: it has {saved_one} where this one has {own}")
    try:
        check_config(replica, path, saved.config)
        columns = columns_of(path, dict(saved.config))
    except ModelFileError as error:
        raise CheckpointError(str(error)) from error
    _check_columns(path, columns, replica.columns)
    for name, value in settings.items():
        if progress.settings.get(name) != value:
            values = f"{name}={progress.settings.get(name)!r}, and this one has {name}={value!r}"
            raise CheckpointError(f"{path} is of a training with {values}; give the same to resume from it")
    if len(progress.rates) != len(replica.learning_rates):
        counts = f"{len(progress.rates)} learning rates, and this one has {len(replica.learning_rates)}"
        raise CheckpointError(f"{path} is of a training with {counts}")
    if progress.step > steps or (progress.step and len(progress.values[0]) != len(replica.metrics) + 1):
        raise UnusableError(f"{path} is damaged: step {progress.step} of {steps}")


def _check_columns(path: str, saved: Columns | None, own: Columns | None) -> None:
    if saved is not None and own is not None and not saved.agrees_with(own):
        raise CheckpointError(
            f"{path} is of a training on a table with other columns, means, categories or classes; give the same "
            f"table, or keep what was learned of it: --load {path}, columns=load_network(path).columns"
        )


def _described(name: str, shape: Any) -> str:
    return f"{name} of shape {tuple(shape)}"


RANDOM = "random"


def random_state() -> dict[str, np.ndarray]:
    """Return the states of Python's and NumPy's global random generators, as an array."""
    return {RANDOM: encode(data.generator_states()[:2])}


def load_random_state(state: dict[str, np.ndarray]) -> None:
    """Load a result of `random_state` into the global random generators. Raises KeyError, TypeError, ValueError or
    OverflowError for anything else."""
    data.load_generator_states((*decode(state[RANDOM]), None))
