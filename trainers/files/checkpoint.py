"""Checkpoints: files from which a training goes on. No pickle, no MPI.

A checkpoint is a model file (trainers.files.model_file), so whatever loads a saved model loads it too. What it has
besides begins with "checkpoint": where the training was, what of it belongs to single ranks, and the checksums of
everything. A file takes its name when it is complete and on the disk, so a kill at any moment leaves the ones before.
"""

import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trainers.errors import CheckpointError, ModelFileError, UnusableError
from trainers.files import model_file
from trainers.files.model_file import BESIDE, HEADER, check_numbers, header_of, model_in, replacing, sync_folder

log = logging.getLogger("trainers")

FORMAT = 1
LOCAL, MEASURED = f"{BESIDE}.rank", f"{BESIDE}.measured"
NAME = re.compile(r"checkpoint-(\d{8,18})\.npz")
ASIDE = re.compile(r"\.(checkpoint-\d{8,18}|best)\.npz\.[0-9a-f]{8}")  # what a killed writer leaves; see `replacing`
BEST = "best.npz"


@dataclass(frozen=True)
class Progress:
    """How far a training has come: all of it fits JSON.

    epoch: epochs that are finished; step: steps that are done of the next one; total: steps since the beginning.
    seconds: what these steps of an unfinished epoch took.
    ranks: of the job.
    settings: what a resumed training must share, by name: "batch_size", "seed", "rows", ...
    shapes: of the named parameters, in their order: [["layer 1 weights", [64, 32]], ...]; may be empty.
    rates: the learning rates, one a group of parameters.
    choices: what was chosen for the job: {"allreduce": "shared", ...}.
    history: the epochs so far, as trainers.watching.history.Epoch.as_dict gives them.
    """

    epoch: int
    step: int
    total: int
    ranks: int
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    shapes: list[Any] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    choices: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step + 1}" if self.step else f"the end of epoch {self.epoch}"


@dataclass(frozen=True)
class Saved:
    """A checkpoint in memory.

    kind, config, state: the replica's class, `config` and `state`.
    local: each rank's `local_state`, by rank.
    measured: the values of the steps of an unfinished epoch, (progress.step, metrics).
    """

    kind: str
    config: dict[str, Any]
    state: dict[str, np.ndarray]
    progress: Progress
    local: list[dict[str, np.ndarray]] = field(default_factory=list)
    measured: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))


def path_of(folder: str, total: int) -> str:
    """The path of the checkpoint after `total` steps."""
    return os.path.join(folder, f"checkpoint-{total:08d}.npz")


def paths(folder: str, total: float = math.inf) -> list[str]:
    """The paths of the checkpoints in a folder, newest first, after `total` steps or less. Raises OSError.

    There are none when there is no such folder.
    """
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := NAME.fullmatch(name))]
    except FileNotFoundError:
        return []
    return [os.path.join(folder, name) for number, name in sorted(found, reverse=True) if number <= total]


def write(path: str, saved: Saved) -> None:
    """Write a checkpoint to `path`; afterwards it is on the disk. Raises CheckpointError."""
    try:
        with replacing(path, durable=True) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in _arrays(saved):
                model_file.put(archive, name, array)
            sums = {member.filename[:-4]: member.CRC for member in archive.infolist()}
            header = {"format": FORMAT, "checksums": sums, **asdict(saved.progress)}
            model_file.put(archive, BESIDE, np.array(json.dumps(header, default=_plain)))
    except OSError as error:
        raise CheckpointError(f"the checkpoint can't be written to {path}: {error.strerror or error}") from error


def _arrays(saved: Saved) -> Iterator[tuple[str, np.ndarray]]:
    yield HEADER, header_of(saved.kind, saved.config)
    yield from saved.state.items()
    for rank, own in enumerate(saved.local):
        for name, array in own.items():
            yield f"{LOCAL}{rank}.{name}", array
    yield MEASURED, saved.measured


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays, which callbacks may have put into a history."""
    return value.tolist()


def read(path: str) -> Saved:
    """The checkpoint in `path`. Raises CheckpointError, also when any bit of what it holds was altered."""

    def refusal(error: object) -> CheckpointError:
        return CheckpointError(f"{path} is no checkpoint, or it is damaged ({error})")

    try:
        file = model_file.open_regular(path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} can't be read: {error.strerror or error}") from error
    with file, model_file.opened(file, model_file.size(file), refusal) as archive:
        header = json.loads(str(archive[BESIDE]))
        if header["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {header['format']}, and this version reads format {FORMAT}")
        sums = archive.checksums
        del sums[BESIDE]
        if sums != header["checksums"]:
            raise ValueError("its checksums are not those of its arrays")
        progress = _progress(header)
        model, state = model_in(archive)
        for name, array in state.items():
            check_numbers(path, name, array)
        local: list[dict[str, np.ndarray]] = [{} for _ in range(progress.ranks)]
        for name in archive.names:
            if name.startswith(LOCAL):
                rank, _, own = name.removeprefix(LOCAL).partition(".")
                local[int(rank)][own] = archive[name]
        measured = archive[MEASURED]
        if measured.ndim != 2 or len(measured) != progress.step or measured.dtype.kind != "f":
            raise ValueError(f"{progress.step} steps, and measured {measured.dtype}{measured.shape}")
        kind, config = str(model["kind"]), dict(model["config"])
    return Saved(kind, config, state, progress, local, measured)


def _progress(header: dict[str, Any]) -> Progress:
    """What the header says, when it makes sense."""
    given = {name: header[name] for name in Progress.__dataclass_fields__}
    for name, kind in (("epoch", int), ("step", int), ("total", int), ("ranks", int), ("seconds", float)):
        if type(given[name]) is not kind or not 0 <= given[name] < 2**62:
            raise ValueError(f"{name} is {given[name]!r}")
    if not all(type(rate) in (int, float) and 0 <= rate < float("inf") for rate in given["rates"]):
        raise ValueError(f"the learning rates are {given['rates']!r}")
    for name in ("settings", "choices"):
        given[name] = dict(given[name])
    if not 1 <= given["ranks"] < 1 << 20 or len(given["history"]) > given["epoch"]:
        raise ValueError(f"{given['ranks']} ranks, {given['epoch']} epochs and a history of {len(given['history'])}")
    return Progress(**given)


def newest(folder: str, check: Callable[[str, Saved], object] | None = None) -> tuple[str, Saved] | None:
    """The newest usable checkpoint of a folder and its path; None when there are no checkpoints there.

    check: called with a path and its checkpoint; raises UnusableError for one that is to be passed over, and anything
        else for one that ends the search.
    One that is damaged is passed over too, each with a line to the logger "trainers". Raises CheckpointError when there
    are some, and none of them is usable, or the folder can't be read.
    """
    try:
        found = paths(folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} can't be read: {error.strerror or error}") from error
    errors = []
    for path in found:
        try:
            saved = read(path)
        except ModelFileError as error:
            if not os.path.exists(path):
                continue  # its writer has newer ones by now
            unusable = error
        else:
            try:
                if check is not None:
                    check(path, saved)
                return path, saved
            except UnusableError as error:
                unusable = error
        errors.append(str(unusable))
        log.warning("trainers: %s; the one before is used", unusable)
    if errors:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {errors[0]}; remove them to begin anew")
    return None


def prune(folder: str, total: int, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest ones, after `total` steps or less. Raises CheckpointError.

    What claims to be of later steps is damaged, or training would have begun there; so it stays, and does not count.
    """
    for path in paths(folder, total)[keep:]:
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            raise CheckpointError(f"the old checkpoint {path} can't be removed: {error.strerror or error}") from error


def keep_as_best(path: str) -> None:
    """Keep a checkpoint as best.npz of its folder, also when it is removed itself. Raises CheckpointError."""
    best = os.path.join(os.path.dirname(path), BEST)
    aside = f"{os.path.dirname(best)}/.{BEST}.{secrets.token_hex(4)}"
    try:
        try:
            os.link(path, aside)
            os.replace(aside, best)
            sync_folder(os.path.dirname(best))
        except OSError:  # not every file system has links
            with open(path, "rb") as source, replacing(best, durable=True) as file:
                shutil.copyfileobj(source, file)
    except OSError as error:
        raise CheckpointError(f"the best checkpoint can't be written to {best}: {error.strerror or error}") from error


@contextmanager
def in_use(folder: str) -> Iterator[None]:
    """Meanwhile no other training may write there, in this process or another. Raises CheckpointError.

    Where the file system has no locks for folders (NFS), nobody is refused.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another training that goes on now writes its checkpoints to {folder}; give each a folder of its own"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def clean(folder: str) -> None:
    """Remove what writers that were killed have left. Raises OSError."""
    for name in os.listdir(folder):
        if ASIDE.fullmatch(name):
            with suppress(FileNotFoundError, IsADirectoryError):  # no folder is of ours
                os.unlink(os.path.join(folder, name))
