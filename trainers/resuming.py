"""Whether a training can write its checkpoints to a folder, and go on from one that is there. Local, no MPI."""

import itertools
import logging
import os
import tempfile
from contextlib import ExitStack
from typing import Any

import numpy as np

from trainers import fingerprint, random_state
from trainers.errors import CheckpointError, ModelFileError, UnusableError
from trainers.files import checkpoint as files
from trainers.files.checkpoint import Saved
from trainers.fingerprint import Fingerprint
from trainers.replica import Replica
from trainers.watching.history import Epoch

log = logging.getLogger("trainers")


def prepare(folder: str, held: ExitStack) -> None:
    """Make the folder where it is missing, and clean it of what killed writers have left. Raises CheckpointError.

    held: keeps it for this training until it is closed.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        held.enter_context(files.in_use(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room?")
        files.clean(folder)
    except OSError as error:
        reason = f"{error.strerror or error}; give a folder that can be written to"
        raise CheckpointError(f"checkpoints can't be written to {folder}: {reason}") from error


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


def check_data(path: str, saved: Saved, data: Fingerprint, rows: int) -> None:
    """Refuse a checkpoint of other data than these; one of an older version has no fingerprint, and is taken.

    Raises CheckpointError.
    """
    differs = fingerprint.difference(saved.progress.settings.get("data"), data, rows)
    if differs:
        raise CheckpointError(
            f"{path} is of a training with other data: {differs}; give the same rows in the same order, or go on with "
            "these on purpose: checkpoint=Checkpoint(folder, same_data=False), --other-data"
        )


def check_way(path: str, saved: Saved, kind: str, together: bool, choices: dict[str, str], ranks: int) -> None:
    """Refuse, or say, what a trainer of this kind does in another way than the one that wrote the checkpoint.

    Raises UnusableError for the middle of an epoch whose steps ranks do not take together.

    together: whether its ranks take steps together. choices: what was chosen for the job. ranks: how many it has.
    """
    progress = saved.progress
    if progress.step and not together:
        raise UnusableError(f"{path} is of the middle of an epoch, and {kind} goes on from the end of one")
    if progress.choices.get("allreduce") != choices.get("allreduce"):
        chosen = f"{progress.choices.get('allreduce')} before, and by {choices.get('allreduce')} now"
        log.warning("trainers: gradients were averaged by %s: the last bits may differ", chosen)
    if progress.ranks != ranks:
        text = f"{progress.ranks} ranks, and this training has {ranks}"
        log.warning("trainers: %s was written on %s: the last bits may differ, and random states do", path, text)


def take_own(replica: Replica, local: dict[str, np.ndarray], own: dict[str, np.ndarray], folder: str) -> None:
    """Take on what is a rank's own: its replica's `local` state, and the random numbers of the programs in `own`."""
    try:
        replica.load_local_state(local)
        random_state.load(own)
    except (ModelFileError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        text = f"the checkpoint in {folder} is damaged, or of another model"
        raise CheckpointError(f"{text}: a rank can't go on with what is its own: {error!r}") from error


def _described(name: str, shape: Any) -> str:
    return f"{name} of shape {tuple(shape)}"
