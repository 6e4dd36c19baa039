"""Model files: a .npz of plain arrays, readable with NumPy alone. No pickle, no MPI, no number of ranks.

A checkpoint (trainers.files.checkpoint) is a model file with more in it, which is passed over here.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import numpy as np

from trainers.errors import ModelFileError
from trainers.files import npz, regular

HEADER = "model"  # the array that holds the JSON text {"format", "kind", "config"}
FORMAT = 1
BESIDE = "checkpoint"  # names that begin so are no part of the model


def write(path: str, kind: str, config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Write a model to exactly `path`. Raises ModelFileError."""
    try:
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **{HEADER: header_of(kind, config)}, **state)
    except OSError as error:
        raise ModelFileError(f"the model can't be written to {path}: {error.strerror or error}") from error


def header_of(kind: str, config: dict[str, Any]) -> np.ndarray:
    """What says which model the other arrays are."""
    return np.array(json.dumps({"format": FORMAT, "kind": kind, "config": config}))


def read(path: str, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the state of a model of this kind. Raises ModelFileError."""

    def refusal(error: object) -> ModelFileError:
        return ModelFileError(f"{path} is no model file, or it is damaged ({error}); save() writes one")

    try:
        file = regular.open_regular(path)
    except OSError as error:
        raise ModelFileError(f"the model file {path} can't be read: {error.strerror or error}") from error
    with file, npz.opened(file, regular.size(file), refusal) as archive:
        header, arrays = model_in(archive)
    if header.get("format") != FORMAT or header.get("kind") != kind:
        found = f"{header.get('kind')}, format {header.get('format')}"
        raise ModelFileError(f"{path} holds a model of another kind ({found}); expected {kind}, format {FORMAT}")
    if not isinstance(header.get("config"), dict):
        raise refusal("its header has no config")
    for name, array in arrays.items():
        check_numbers(path, name, array)
    return header["config"], arrays


def model_in(archive: npz.Archive) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of the model. Raises all kinds of errors."""
    arrays = {name: archive[name] for name in archive.names if not name.startswith(BESIDE)}
    header = json.loads(str(arrays.pop(HEADER)))
    if not isinstance(header, dict):
        raise ValueError(f"its header is {header!r}")
    return header, arrays


def check_numbers(path: str, name: str, array: np.ndarray) -> None:
    """Refuse text, and numbers that training can't go on from; a module's own buffers may hold infinities."""
    if array.dtype.kind not in "iufcb":
        raise ModelFileError(f"{path} is damaged: {name} is {array.dtype}, no numbers")
    trained = name == "parameters" or name.startswith(("optimizer.", "input."))
    if trained and not np.isfinite(array).all():
        raise ModelFileError(f"{path} holds a model that has diverged: {name} has elements that are not finite")


@contextmanager
def replacing(path: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is complete; after an exception nothing is left.

    A link is followed. What is no regular file (/dev/stdout, a named pipe) stays, and is written to as it is.
    durable: have it on the disk before it takes its place, and its name after, so that a crash of the machine leaves
        either the old file or the new one. It replaces a link or a pipe too, which nobody but a user could mean.
    """
    if not durable:
        if is_special(path):
            with open(path, "wb") as file:
                yield file
            return
        path = os.path.realpath(path)
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # as the umask has it
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):  # the whole folder may be gone
            os.unlink(aside)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_special(path: str) -> bool:
    """Whether something is there that is no regular file."""
    return os.path.exists(path) and not os.path.isfile(path)
