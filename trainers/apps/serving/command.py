"""The command `python -m trainers serve`: answers requests over HTTP by a saved model, on all ranks."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.elastic.exchange import Exchange
from allreduce.elastic.ranks import root_value, together
from allreduce.topology import Topology
from trainers import arguments
from trainers.apps.serving.answering import answer_requests
from trainers.apps.serving.dealing import LOAD, PREDICT, STOP, UNLOAD, Prepared, Server
from trainers.apps.serving.models import ENDINGS, Model
from trainers.apps.serving.versions import (
    AVAILABLE,
    Found,
    Version,
    Versions,
    checked_canary,
    load_whole,
    scan,
    wanted_of,
)
from trainers.apps.serving.web import check_packages, listen
from trainers.arguments import integer
from trainers.cli.command import Command
from trainers.errors import ArgumentError, ModelFileError, as_error
from trainers.recovery.terminating import Terminating

log = logging.getLogger("trainers")

ABOUT = """Answer requests over HTTP by a saved model, on all ranks.

Rank 0 listens, puts requests together to batches, and deals these to ranks that have no work. The paths are as in
TensorFlow Serving's REST interface: POST /v1/models/NAME:predict with {"instances": [row, ...]}. The folder of a model
has a folder for each version, 0001/model.npz; a new one is loaded while the others answer. SIGTERM answers all requests
that have come, and ends with exit code 0. Start it by `mpirun --with-ft ulfm` to go on when a rank is killed.
"""
EXAMPLES = """examples:
  mpirun --with-ft ulfm -n 4 python -m trainers serve --model model.npz --port 8501
  mpirun --with-ft ulfm -n 4 python -m trainers serve --model models/digits --canary 0002=0.1
  curl -d '{"instances": [[0, 1, 2, 3]]}' http://127.0.0.1:8501/v1/models/model:predict
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", metavar="FILE", required=True, help="a .npz or .onnx file, or a folder with folders of versions")
    add("--name", help="in the paths (default: the name of the file or folder, without its ending)")
    add("--address", default="127.0.0.1", help="to listen at; 0.0.0.0: other hosts, too (default: 127.0.0.1)")
    add("--port", type=integer(0, 65535), default=8501, help="0: any free one, which is printed (default: 8501)")
    add("--max-batch", type=integer(1, 1 << 20), default=64, metavar="N", help="rows of a batch (default: 64)")
    add(
        "--max-wait-ms", type=_seconds(0, 60_000), default=2.0, metavar="MS",
        help="how long a request waits for others to fill its batch (default: 2)",
    )  # fmt: skip
    add(
        "--max-queue", type=integer(1, 1 << 30), default=4096, metavar="N",
        help="rows that may wait; further requests get 429 (default: 4096)",
    )  # fmt: skip
    add("--max-rows", type=integer(1, 1 << 20), default=1024, metavar="N", help="of a request (default: 1024)")
    add(
        "--max-request-bytes", type=integer(64, 1 << 30), default=1 << 23, metavar="N",
        help="of a request's body (default: 8388608)",
    )  # fmt: skip
    add("--max-connections", type=integer(1, 1 << 16), default=512, metavar="N", help="at a time (default: 512)")
    add(
        "--answer-seconds", type=_seconds(0.01), default=10.0, metavar="S",
        help="after which a batch is dealt to another rank, once (default: 10)",
    )  # fmt: skip
    add(
        "--drain-seconds", type=_seconds(1), default=30.0, metavar="S",
        help="for the last answers after SIGTERM (default: 30)",
    )  # fmt: skip
    add(
        "--canary", metavar="VERSION=SHARE", nargs="+", action="extend", default=[],
        help="the mean share of requests without a version that this version answers, drawn for each: 0002=0.1",
    )  # fmt: skip
    add("--keep", type=integer(1, 100), default=2, metavar="N", help="newest versions that are loaded (default: 2)")
    add(
        "--poll-seconds", type=_seconds(0.01), default=1.0, metavar="S",
        help="between two looks for new versions (default: 1)",
    )  # fmt: skip


COMMAND = Command("--model FILE [--port PORT] [options]", ABOUT, EXAMPLES, add_options)


def _seconds(least: float, most: float = 3600) -> Callable[[str], float]:
    return arguments.number(f"a number from {least:g} to {most:g}", lambda value: least <= value <= most)


def run(arguments: Sequence[str], world: Topology, program: str) -> bool:
    """Run the command. Collective. Raises the same error on all ranks. Returns True: it obeys SIGTERM."""
    options = together(world.world, lambda: COMMAND.parse(arguments, world.rank == 0, program))
    prepared = together(world.world, lambda: _prepared(options) if world.rank == 0 else None)
    try:
        found = root_value(world.world, prepared and prepared.files, "learn the versions of the model")
        models = together(
            world.world,
            lambda: {} if prepared else {number: _same(path, stamp) for number, path, stamp in found},
        )
        exchange = Exchange(world)
        with Terminating() as sigterm:
            if prepared is not None:
                Server(options, exchange, prepared, sigterm).run()
            else:
                Worker(exchange, models, sigterm).run()
            exchange.close()
            sigterm.agreed = True
    finally:
        if prepared is not None:
            prepared.listener.close()
    return True


def _prepared(options: argparse.Namespace) -> Prepared:
    """On rank 0: load the versions, and listen."""
    check_packages()
    path = os.path.abspath(options.model)
    is_folder = os.path.isdir(path)
    if not is_folder and not path.endswith(ENDINGS):
        raise ArgumentError(f"--model {options.model}: give a file that ends in .npz or .onnx, or a folder of versions")
    stem = os.path.basename(path) if is_folder else os.path.splitext(os.path.basename(path))[0]
    name = stem if options.name is None else options.name
    if not name or any(char in name for char in "/:") or not name.isprintable():
        raise ArgumentError(f"the name {name!r} can't be in a path: give another --name, without / and :")
    canary = checked_canary(options.canary)
    if canary and not is_folder:
        raise ArgumentError(f"--canary: --model {options.model} is a file; versions are in a folder")
    versions = Versions(name, canary)
    found = _versions_in(options, versions, path) if is_folder else {}
    if not is_folder:
        versions.add(Version(1, path, AVAILABLE, load_whole(path)))
    return Prepared(versions, listen(options.address, options.port), found)


def _versions_in(options: argparse.Namespace, versions: Versions, folder: str) -> dict[int, Found]:
    """Load the versions in a folder, the newest first; returns their files. Raises ModelFileError if there is none."""
    with as_error(ModelFileError, f"--model {options.model} can't be read"):
        found = scan(folder)
    for number in sorted(wanted_of(found, options.keep, versions.canary), reverse=True):
        version = versions.load(number, found[number].path)
        if not version.error:
            version.state = AVAILABLE
    if not versions.available():
        raise ModelFileError(
            next((version.error for version in versions.listed()), "")
            or f"--model {options.model} has no version: expected is a folder 0001, say, with one .npz or .onnx file"
        )
    return {version.number: found[version.number] for version in versions.listed()}


def _same(path: str, stamp: str) -> Model:
    """Load a model on another rank. Raises ModelFileError if its file differs from rank 0's."""
    model = load_whole(path)
    if model.stamp != stamp:
        raise ModelFileError(
            f"{path} is another file here ({model.stamp}) than on rank 0 ({stamp}); all ranks must read the same one"
        )
    return model


# The other ranks


class Worker:
    """A rank that answers batches. models: by version."""

    def __init__(self, exchange: Exchange, models: dict[int, Model], sigterm: Terminating) -> None:
        self._exchange, self._models, self._sigterm = exchange, models, sigterm
        self._told = False

    def run(self) -> None:
        """Answer until rank 0 ends."""
        answer_requests(self._exchange, self._handle, self._tell)

    def _handle(self, header: dict[str, Any], arrays: list[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
        if PREDICT in header:
            return {}, [self._models[header[PREDICT]].predict(arrays[0])]
        if LOAD in header:
            self._models[header[LOAD]] = _same(header["path"], header["stamp"])
        else:
            self._models.pop(header[UNLOAD], None)
        return {}, []

    def _tell(self) -> None:
        """SIGTERM on this rank ends the server, as on rank 0."""
        if self._sigterm.here and not self._told:
            self._told = True
            self._exchange.send(0, {STOP: True})
