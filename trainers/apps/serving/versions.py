"""Versions of a served model: the folders that hold them, which of them answer, a watcher, and loading. No MPI.

    models/digits/0001/model.npz
    models/digits/0002/model.onnx

The name of the folder, digits, is the name of the model. Only folders whose names are digits are versions.
"""

import hashlib
import logging
import os
import random
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from trainers.apps.serving.models import ENDINGS, Model, NetworkModel, OnnxModel
from trainers.errors import ArgumentError, ModelFileError, TrainerError, as_error, explained
from trainers.files import model_file
from trainers.replicas.numpy.categories import load_network

log = logging.getLogger("trainers")

FOLDER = re.compile(r"[0-9]{1,9}")
LOADING, AVAILABLE, UNLOADING, END = "LOADING", "AVAILABLE", "UNLOADING", "END"  # TensorFlow Serving's words


class Found(NamedTuple):
    """The file of a version. stamp: changes when the file is written; of an .onnx file, which may have its constants in
    another one, when any file of the folder is."""

    path: str
    stamp: tuple[int, ...]


def scan(folder: str) -> dict[int, Found]:
    """Return the versions in a folder that have one model file. Raises OSError if the folder can't be read."""
    found = {}
    for own in Path(os.path.abspath(folder)).iterdir():  # so a version has the same path, whatever the form of `folder`
        with suppress(OSError):  # it is no folder, or a file was removed meanwhile
            if FOLDER.fullmatch(own.name):
                listed = sorted(each for each in own.iterdir() if not each.name.startswith("."))
                files = [each for each in listed if each.suffix in ENDINGS]
                stamped = listed if files and files[0].suffix == ".onnx" else files
                if len(files) == 1:
                    statuses = [each.stat() for each in stamped]
                    stamp = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in statuses]
                    found[int(own.name)] = Found(str(files[0]), tuple(chain(*stamp)))
    return found


@dataclass
class Version:
    """A version of the model. loaded: on this rank; None before. error: why it does not answer."""

    number: int
    path: str
    state: str = LOADING
    loaded: Model | None = None
    error: str = ""

    @property
    def model(self) -> Model:
        assert self.loaded is not None
        return self.loaded

    @property
    def stamp(self) -> str:
        """The stamp of the content; "" before it is loaded. If the file is replaced, the version has another."""
        return "" if self.loaded is None else self.loaded.stamp


def checked_canary(given: Iterable[str]) -> dict[int, float]:
    """Return the share of each version in texts such as "0002=0.1". Raises ArgumentError."""
    shares = {}
    for text in given:
        number, _, share = text.partition("=")
        try:
            shares[int(number)] = float(share)
        except ValueError:
            raise ArgumentError(f"--canary {text}: give a version and its share of the requests: 0002=0.1") from None
    if not all(0 < share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        raise ArgumentError(f"--canary {' '.join(given)}: shares are between 0 and 1, and together below 1")
    return shares


@dataclass
class Versions:
    """The versions that are known, by number, and which of them answers a request. From any thread.

    name: of the model. canary: version -> its share of the requests that name no version, on average. draws: random.
    """

    name: str
    canary: Mapping[int, float] = field(default_factory=dict)
    known: dict[int, Version] = field(default_factory=dict)
    draws: random.Random = field(default_factory=random.Random)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, version: Version) -> None:
        with self._lock:
            self.known[version.number] = version

    def drop(self, number: int) -> None:
        with self._lock:
            self.known.pop(number, None)

    def move(self, version: Version, of: Collection[str], to: str, error: str = "") -> bool:
        """Change the state of a version if it is one of those in `of`; return whether it was. The threads of the server
        and of the watcher change states by this alone. error: why it does not answer."""
        with self._lock:
            moved = version.state in of
            if moved:
                version.state, version.error = to, error or version.error
        return moved

    def load(self, number: int, path: str) -> Version:
        """Load a version on this rank, and add it. One that can't be loaded is at its END."""
        version = Version(number, path)
        try:
            version.loaded = load_alike(path, [each.model for each in self.available()])
        except TrainerError as error:
            log.warning("version %d is not served: %s", number, error)
            version.state, version.error = END, str(error)
        self.add(version)
        return version

    def listed(self) -> list[Version]:
        """Return the versions, newest first."""
        with self._lock:
            return sorted(self.known.values(), key=lambda version: -version.number)

    def available(self) -> list[Version]:
        """Return the versions that answer, newest first."""
        return [version for version in self.listed() if version.state == AVAILABLE]

    def choose(self, number: int | None) -> Version | None:
        """Return the version that answers a request; None if there is none. number: as the request names it.

        Without a number it is the newest one that is no canary; or a canary, drawn with the probability of its share.
        """
        drawn = self.draws.random()
        for version in self.available() if number is None else ():
            drawn -= self.canary.get(version.number, 0.0)
            if drawn < 0:
                return version
        return self.at(number)

    def at(self, number: int | None) -> Version | None:
        """Return the version of a number, or the newest one that is no canary."""
        available = self.available()
        if number is not None:
            return next((version for version in available if version.number == number), None)
        settled = [version for version in available if version.number not in self.canary]
        return next(iter(settled or available), None)


def load_alike(path: str, others: Iterable[Model]) -> Model:
    """Load a model that takes the same rows as the other versions do. Raises ModelFileError."""
    loaded = load_whole(path)
    for other in others:
        both = loaded.outputs is not None and other.outputs is not None
        given, wanted = signature(loaded, both), signature(other, both)
        if given != wanted:
            raise ModelFileError(
                f"{path}: this version takes {given}, and the version that answers takes {wanted}; serve it under "
                "another name, by another server"
            )
    return loaded


def signature(model: Model, with_outputs: bool) -> str:
    """Say in words which rows a model takes, and how many outputs it has."""
    shape = " x ".join("any" if size is None else str(size) for size in model.shape) or "1"
    table = ""
    if model.columns is not None:
        table = f" of the columns {', '.join(column.name for column in model.columns.columns)}"
    outputs = f" and gives {model.outputs} outputs" if with_outputs else ""
    return f"rows of {shape} {model.dtype.name}{table}{outputs}"


class Watcher:
    """Watches the folder of a model in a thread of rank 0, and loads new versions on this rank.

    folder: of the versions. keep: how many of the newest versions are loaded, besides the canaries. seconds: between
    two looks. A file is loaded when it is the same in two looks; one that can't be loaded, when it has changed. wake:
    called in the thread when a version is LOADING, which the other ranks have to load, or UNLOADING.
    """

    def __init__(self, folder: str, versions: Versions, keep: int, seconds: float, wake: Callable[[], object]) -> None:
        self._folder, self._versions, self._keep, self._seconds, self._wake = folder, versions, keep, seconds, wake
        self._before: dict[int, Found] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)

    def start(self, found: Mapping[int, Found]) -> None:
        """Start the thread. found: the files of the versions that are loaded already."""
        self._before = dict(found)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self.look()
            except OSError as error:  # the versions go on to answer
                log.warning("the folder %s can't be read: %s", self._folder, error.strerror or error)
            except Exception:
                log.exception("the watcher of %s met an error, and continues", self._folder)

    def look(self) -> None:
        """Compare the folder with the versions that are loaded."""
        found = scan(self._folder)
        known = {version.number: version for version in self._versions.listed()}
        refused = {number for number, version in known.items() if version.state == END}
        wanted = wanted_of(found.keys() - refused, self._keep, self._versions.canary)
        complete = wanted <= {version.number for version in self._versions.available()}
        for number, version in known.items():
            displaced = number not in wanted | refused and complete  # an old one stays until the new ones answer
            gone = number not in found or found[number] != self._before.get(number) or displaced
            if gone and self._versions.move(version, (LOADING, AVAILABLE, END), UNLOADING):
                log.warning("version %d is gone, and answers no more requests", number)
                self._wake()
        for number in sorted(wanted - known.keys(), reverse=True):
            if self._before.get(number) == found[number]:
                self._versions.load(number, found[number].path)
                self._wake()
        self._before = found


def wanted_of(found: Iterable[int], keep: int, canary: Mapping[int, float]) -> set[int]:
    """Return the versions to load: the canaries, and the newest `keep` others."""
    present = set(found)
    canaries = present & set(canary)
    return canaries | set(sorted(present - canaries, reverse=True)[:keep])


def load_model(path: str) -> Model:
    """Load a saved model: a .npz of `save`, or an .onnx file (needs the extra "export"). Raises ModelFileError, and
    ArgumentError if a package is missing."""
    if path.endswith(".onnx"):
        with as_error(ModelFileError, f"the model file {path} can't be read"):
            model_file.open_regular(path).close()
        return OnnxModel(path)
    kind, _ = model_file.read_header(path)
    if kind == "Ensemble":
        ensembles: Any = import_module("trainers.apps.ensemble.model")  # which is above this package
        loaded: Model = ensembles.EnsembleModel.load(path)
        return loaded
    return NetworkModel(load_network(path))


def load_whole(path: str) -> Model:
    """Load a model whose file may be in the course of being written, with the stamp of its content, by which ranks
    compare what they have loaded. Raises ModelFileError if a file changes meanwhile, and the errors of `load_model`;
    whatever a damaged file makes a package raise becomes a ModelFileError."""
    damaged = explained(ModelFileError, f"{path} can't be loaded", passes=(TrainerError,))
    with damaged, as_error(ModelFileError, f"the model file {path} can't be read"):
        files = [path, *_constants(path)]
        stamp = _stamp(files)
        model = load_model(path)
        model.stamp = _stamp(files)
    if model.stamp != stamp:
        raise ModelFileError(f"{path} changed while it was read")
    return model


def _stamp(files: Sequence[str]) -> str:
    """Return the size and a hash of the content of files, which are equal for equal copies on all hosts."""
    total, content = 0, hashlib.blake2b(digest_size=16)
    for path in files:
        with model_file.open_regular(path) as file:
            while piece := file.read(model_file.PIECE):
                total += len(piece)
                content.update(piece)
    return f"{total} bytes, BLAKE2b {content.hexdigest()}"


def _constants(path: str) -> list[str]:
    """Return the files beside an .onnx file that have its constants: it has pairs of "location" and a file name."""
    if not path.endswith(".onnx"):
        return []
    with model_file.open_regular(path) as file:
        content = file.read()
    places = re.finditer(rb"\n\x08location\x12([\x01-\x7f])", content)
    names = {os.fsdecode(content[place.end() : place.end() + place[1][0]]) for place in places}
    beside = (os.path.join(os.path.dirname(path), name) for name in sorted(names) if "\0" not in name)
    return [each for each in beside if os.path.isfile(each)]
