"""Model files: a .npz of plain arrays, readable with NumPy alone. No pickle, no MPI, no number of ranks."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from trainers.errors import ModelFileError
from trainers.files import npz, regular

HEADER = "model"  # the array that holds the JSON text {"format", "kind", "config"}
FORMAT = 1


def write(path: str, kind: str, config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
    """Write a model to exactly `path`. Raises ModelFileError."""
    header = json.dumps({"format": FORMAT, "kind": kind, "config": config})
    try:
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **{HEADER: np.array(header)}, **state)
    except OSError as error:
        raise ModelFileError(f"the model can't be written to {path}: {error.strerror or error}") from error


def read(path: str, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the state of a model of this kind. Raises ModelFileError."""

    def refusal(error: object) -> ModelFileError:
        return ModelFileError(f"{path} is no model file, or it is damaged ({error}); save() writes one")

    try:
        file = regular.open_regular(path)
    except OSError as error:
        raise ModelFileError(f"the model file {path} can't be read: {error.strerror or error}") from error
    with file, npz.opened(file, regular.size(file), refusal) as archive:
        arrays = {name: archive[name] for name in archive.names}
        header = json.loads(str(arrays.pop(HEADER)))
    if not isinstance(header, dict):
        raise refusal(f"its header is {header!r}")
    if header.get("format") != FORMAT or header.get("kind") != kind:
        found = f"{header.get('kind')}, format {header.get('format')}"
        raise ModelFileError(f"{path} holds a model of another kind ({found}); expected {kind}, format {FORMAT}")
    if not isinstance(header.get("config"), dict):
        raise refusal("its header has no config")
    for name, array in arrays.items():
        _check_numbers(path, name, array)
    return header["config"], arrays


def _check_numbers(path: str, name: str, array: np.ndarray) -> None:
    """Refuse text, and numbers that training can't go on from; a module's own buffers may hold infinities."""
    if array.dtype.kind not in "iufcb":
        raise ModelFileError(f"{path} is damaged: {name} is {array.dtype}, no numbers")
    trained = name == "parameters" or name.startswith(("optimizer.", "input."))
    if trained and not np.isfinite(array).all():
        raise ModelFileError(f"{path} holds a model that has diverged: {name} has elements that are not finite")


@contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when it is complete; after an exception nothing is left.

    A link is followed. What is no regular file (/dev/stdout, a named pipe) stays, and is written to as it is.
    """
    if is_special(path):
        with open(path, "wb") as file:
            yield file
        return
    path = os.path.realpath(path)
    handle, aside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(aside, 0o666 & ~umask)  # mkstemp makes files that nobody else may read
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def is_special(path: str) -> bool:
    """Whether something is there that is no regular file."""
    return os.path.exists(path) and not os.path.isfile(path)
