"""Checkpoints: files from which a training resumes. No pickle, no MPI.

A checkpoint is a model file (trainers.files.model_file), so it can be loaded as a saved model too. Its additional
entries begin with "checkpoint": the progress of the training, the state of single ranks, and checksums. A file gets its
name only when it is complete and on disk, so a kill at any moment leaves the earlier checkpoints intact.
"""

import fcntl
import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainers.errors import CheckpointError, ModelFileError, UnusableError, as_error
from trainers.files import model_file
from trainers.files.model_file import CHECKPOINT, HEADER, check_numbers, header_of, model_in, replacing

log = logging.getLogger("trainers")

FORMAT = 4  # 3: other facts about the data, and the backend
LOCAL, MEASURED, SHARED = f"{CHECKPOINT}.rank", f"{CHECKPOINT}.measured", f"{CHECKPOINT}.shared."
NAME = re.compile(r"checkpoint-(\d{8,18})\.npz")
TEMPORARY = re.compile(r"\.checkpoint-\d{8,18}\.npz\.[0-9a-f]{8}")  # of a killed writer; see `replacing`


BEGIN, STEPS, EVALUATION, EVENTS, SAVE = range(5)  # the stages of an epoch; BEGIN: the fit has not called train_begin
PROGRESS, VALUES = "trainer.progress", "trainer.values"  # the entries of a state that hold its Progress
Arrays = dict[str, np.ndarray]


@dataclass
class Progress:
    """The position of a training, and all that depends on it: an entry of the state of the training. A checkpoint has
    it, and a rank that joins or is behind gets it from another rank. All fields but `values` are JSON types.

    epoch: number of finished epochs. step: number of steps done in the next one. total: number of steps since the
        beginning.
    seconds: the time that the steps of the unfinished epoch took before this fit, or before the checkpoint.
    ranks: the number of ranks of the job.
    settings: the settings that a resumed training must share, by name: "batch_size", "seed", "rows", ...; and the
        place of the batches, the first result of BatchSource.tell, with the name "position".
    shapes: of the named parameters, in their order: [["layer 1 weights", [64, 32]], ...]; may be empty.
    rates: the learning rates, one a group of parameters.
    history: the epochs so far, as trainers.watching.history.Epoch.as_dict gives them.
    values: the values of the steps of the unfinished epoch, as Meter.values gives them.
    stage, logs, stops: not in files. The next stage of the epoch; its logs, when its steps are done; whether all ranks
        know that the training stops, and whether it ends with the epoch.
    """

    epoch: int = 0
    step: int = 0
    total: int = 0
    ranks: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    shapes: list[Any] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    values: np.ndarray = field(default_factory=lambda: np.empty((0, 0)), compare=False)
    stage: int = STEPS
    logs: dict[str, Any] = field(default_factory=dict)
    stops: list[bool] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int, int]:
        """The epoch, step and stage: of two ranks, the one that is behind has the lower place."""
        return self.epoch, self.step, self.stage

    def as_dict(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields without `values`, as JSON types but for numbers of NumPy."""
        return {name: each for name, each in vars(self).items() if name not in ("values", *without)}

    def pack(self) -> Arrays:
        """Return this as entries of a state, for other ranks."""
        return {PROGRESS: np.frombuffer(_text(self.as_dict()).encode(), np.uint8), VALUES: self.values}

    @classmethod
    def taken_from(cls, state: Arrays) -> "Progress":
        """Take the entries of `pack` out of a state."""
        return cls(**json.loads(state.pop(PROGRESS).tobytes()), values=state.pop(VALUES))

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step + 1}" if self.step else f"the end of epoch {self.epoch}"


IN_MEMORY = ("stage", "logs", "stops")  # fields of Progress that files do not have


@dataclass(frozen=True)
class Saved:
    """A checkpoint in memory.

    kind, config, state: the replica's class, `config` and `state`.
    local: each rank's `local_state`, by rank.
    shared: state of the training that is not the model's, and the same on all ranks.
    """

    kind: str
    config: dict[str, Any]
    state: dict[str, np.ndarray]
    progress: Progress
    local: list[dict[str, np.ndarray]] = field(default_factory=list)
    shared: dict[str, np.ndarray] = field(default_factory=dict)


def _text(found: dict[str, Any]) -> str:
    """Return JSON; callbacks may have put numbers and arrays of NumPy into a history."""
    return json.dumps(found, default=lambda value: value.tolist())


def path_of(folder: str, total: int) -> str:
    return os.path.join(folder, f"checkpoint-{total:08d}.npz")


def paths(folder: str, total: float = math.inf) -> list[str]:
    """The paths of the checkpoints in a folder, newest first, after `total` steps or less. Raises OSError.

    Returns [] if the folder does not exist.
    """
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := NAME.fullmatch(name))]
    except FileNotFoundError:
        return []
    return [os.path.join(folder, name) for number, name in sorted(found, reverse=True) if number <= total]


def write(path: str, saved: Saved) -> None:
    """Write a checkpoint to `path`; afterwards it is on the disk. Raises CheckpointError."""
    failed = as_error(CheckpointError, f"the checkpoint can't be written to {path}")
    with failed, replacing(path, durable=True) as file, zipfile.ZipFile(file, "w") as archive:
        arrays = {HEADER: header_of(saved.kind, saved.config), **saved.state}
        arrays |= {f"{LOCAL}{rank}.{name}": each for rank, own in enumerate(saved.local) for name, each in own.items()}
        arrays |= {MEASURED: saved.progress.values, **{f"{SHARED}{name}": each for name, each in saved.shared.items()}}
        for name, array in arrays.items():
            model_file.put(archive, name, array)
        sums = {member.filename[:-4]: member.CRC for member in archive.infolist()}
        header = {"format": FORMAT, "checksums": sums, **saved.progress.as_dict(without=IN_MEMORY)}
        model_file.put(archive, CHECKPOINT, np.array(_text(header)))


def read(path: str) -> Saved:
    """Read and verify the checkpoint in `path`. Raises CheckpointError, also if any bit of its contents has changed."""

    def damaged(error: object) -> CheckpointError:
        return CheckpointError(f"{path} is not a checkpoint, or it is damaged ({error})")

    with as_error(CheckpointError, f"the checkpoint {path} can't be read"):
        file = model_file.open_regular(path)
    with file, model_file.open_archive(file, model_file.size(file), damaged) as archive:
        header = json.loads(str(archive[CHECKPOINT]))
        if header["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {header['format']}, and this version reads format {FORMAT}: resume with the "
                "version that wrote it, or train again in another folder"
            )
        sums = archive.checksums
        del sums[CHECKPOINT]
        if sums != header["checksums"]:
            raise ValueError("its checksums are not those of its arrays")
        progress = _progress(header, archive[MEASURED])
        model, state = model_in(archive)
        shared = {name.removeprefix(SHARED): archive[name] for name in archive.names if name.startswith(SHARED)}
        for name, array in {**state, **shared}.items():
            check_numbers(path, name, array)
        local: list[dict[str, np.ndarray]] = [{} for _ in range(progress.ranks)]
        for name in archive.names:
            if name.startswith(LOCAL):
                rank, _, own = name.removeprefix(LOCAL).partition(".")
                local[int(rank)][own] = archive[name]
        kind, config = str(model["kind"]), dict(model["config"])
    return Saved(kind, config, state, progress, local, shared)


def _progress(header: dict[str, Any], values: np.ndarray) -> Progress:
    """Return the Progress in the header. Raises KeyError, TypeError or ValueError if a field is invalid."""
    given = {name: header[name] for name in Progress().as_dict(without=IN_MEMORY)}
    for name, kind in (("epoch", int), ("step", int), ("total", int), ("ranks", int), ("seconds", float)):
        if type(given[name]) is not kind or not 0 <= given[name] < 2**62:
            raise ValueError(f"{name} is {given[name]!r}")
    if not all(type(rate) in (int, float) and 0 <= rate < float("inf") for rate in given["rates"]):
        raise ValueError(f"the learning rates are {given['rates']!r}")
    given["settings"] = dict(given["settings"])
    if not 1 <= given["ranks"] < 1 << 20 or len(given["history"]) > given["epoch"]:
        raise ValueError(f"{given['ranks']} ranks, {given['epoch']} epochs and a history of {len(given['history'])}")
    if values.ndim != 2 or len(values) != given["step"] or values.dtype.kind != "f":
        raise ValueError(f"{given['step']} steps, and their values are {values.dtype}{values.shape}")
    return Progress(**given, values=values)


def newest(folder: str, check: Callable[[str, Saved], object] | None = None) -> tuple[str, Saved] | None:
    """Return the path and contents of the newest usable checkpoint in a folder; None if the folder has no checkpoints.

    check: check(path, checkpoint) raises UnusableError to skip a checkpoint, or another error to end the search.
        Damaged checkpoints are skipped too. Each skipped one is logged to "trainers". Raises CheckpointError if there
        are checkpoints but none is usable, or the folder can't be read.
    """
    with as_error(CheckpointError, f"the checkpoints in {folder} can't be read"):
        found = paths(folder)
    errors = []
    for path in found:
        try:
            saved = read(path)
        except ModelFileError as error:
            if not os.path.exists(path):
                continue  # removed meanwhile by its writer, which has written newer ones
            unusable = error
        else:
            try:
                if check is not None:
                    check(path, saved)
                return path, saved
            except UnusableError as error:
                unusable = error
        errors.append(str(unusable))
        log.warning("trainers: %s; trying the one before it", unusable)
    if errors:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {errors[0]}; remove them to begin again")
    return None


def prune(folder: str, total: int, keep: int) -> None:
    """Of the checkpoints after at most `total` steps, remove all but the `keep` newest ones. Raises CheckpointError.

    A checkpoint of a later step is damaged, or training would have resumed from it. It is neither removed nor counted.
    """
    for path in paths(folder, total)[keep:]:
        with as_error(CheckpointError, f"the old checkpoint {path} can't be removed"), suppress(FileNotFoundError):
            os.unlink(path)


_locked: set[int] = set()  # the handles of the folders that this process has locked


def _close_locked() -> None:
    """Close the handles in a forked child: as long as a DataLoader's worker had one, its folder would stay locked."""
    while _locked:
        with suppress(OSError):
            os.close(_locked.pop())


os.register_at_fork(after_in_child=_close_locked)


@contextmanager
def in_use(folder: str) -> Iterator[None]:
    """Context manager: lock the folder for one training. Raises CheckpointError if another one, in any process, has
    locked it.

    On file systems without locks for folders (NFS), nothing is locked.
    """
    handle = os.open(folder, os.O_RDONLY)
    _locked.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another running training writes its checkpoints to {folder}; give each a folder of its own"
            ) from None
        except OSError:
            pass
        yield
    finally:
        if handle in _locked:
            _locked.discard(handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was just forked may not have closed its handle yet
            os.close(handle)


def clean(folder: str) -> None:
    """Remove the temporary files of writers that were killed. Raises OSError."""
    for name in os.listdir(folder):
        if TEMPORARY.fullmatch(name):
            with suppress(FileNotFoundError, IsADirectoryError):  # this module creates no folders of such names
                os.unlink(os.path.join(folder, name))
