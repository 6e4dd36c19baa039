"""The command `python -m trainers serve`: answers requests over HTTP by a saved model, on all ranks."""

import argparse
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allreduce.topology import Topology
from allreduce.transport import ulfm
from allreduce.transport.control import root_value, together
from trainers.datasets.parser import RankParser
from trainers.errors import ArgumentError, ModelFileError, TrainerError
from trainers.many.answering import Answer, Dealer, Exchange, answer_requests
from trainers.many.batches import TRIES, Batch, Request, Waiting
from trainers.many.metrics import Metrics
from trainers.many.models import ENDINGS, Model, load_whole
from trainers.many.versions import (
    AVAILABLE,
    END,
    LOADING,
    UNLOADING,
    Found,
    Version,
    Versions,
    Watcher,
    checked_canary,
    load_alike,
    scan,
    wanted_of,
)
from trainers.many.web import Limits, Pages, Web, check_packages, listen
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
IDLE_SECONDS, BUSY_SECONDS = 0.02, 1e-3  # longest pauses of rank 0: without work, and while ranks compute
LOAD_SECONDS = 60.0  # after which another rank may load a version, too
PREDICT, LOAD, UNLOAD, STOP = "predict", "load", "unload", "stop"  # names in headers of work


def make_parser(shown: bool, program: str) -> RankParser:
    """Return the parser. shown: whether this rank prints."""
    usage = "%(prog)s --model FILE [--port PORT] [options]"
    parser = RankParser(shown, "--help", prog=program, usage=usage, description=ABOUT, epilog=EXAMPLES)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", metavar="FILE", required=True, help="a .npz or .onnx file, or a folder with folders of versions")
    add("--name", help="in the paths (default: the name of the file or folder, without its ending)")
    add("--address", default="127.0.0.1", help="to listen at; 0.0.0.0: other hosts, too (default: 127.0.0.1)")
    add("--port", type=_within(0, 65535), default=8501, help="0: any free one, which is printed (default: 8501)")
    add("--max-batch", type=_within(1, 1 << 20), default=64, metavar="N", help="rows of a batch (default: 64)")
    add(
        "--max-wait-ms", type=_within(0, 60_000, float), default=2.0, metavar="MS",
        help="how long a request waits for others to fill its batch (default: 2)",
    )  # fmt: skip
    add(
        "--max-queue", type=_within(1, 1 << 30), default=4096, metavar="N",
        help="rows that may wait; further requests get 429 (default: 4096)",
    )  # fmt: skip
    add("--max-rows", type=_within(1, 1 << 20), default=1024, metavar="N", help="of a request (default: 1024)")
    add(
        "--max-request-bytes", type=_within(64, 1 << 30), default=1 << 23, metavar="N",
        help="of a request's body (default: 8388608)",
    )  # fmt: skip
    add("--max-connections", type=_within(1, 1 << 16), default=512, metavar="N", help="at a time (default: 512)")
    add(
        "--answer-seconds", type=_within(0.01, 3600, float), default=10.0, metavar="S",
        help="after which a batch is dealt to another rank, once (default: 10)",
    )  # fmt: skip
    add(
        "--drain-seconds", type=_within(1, 3600, float), default=30.0, metavar="S",
        help="for the last answers after SIGTERM (default: 30)",
    )  # fmt: skip
    add(
        "--canary", metavar="VERSION=SHARE", nargs="+", action="extend", default=[],
        help="the share of requests without a version that this version answers: 0002=0.1",
    )  # fmt: skip
    add("--keep", type=_within(1, 100), default=2, metavar="N", help="newest versions that are loaded (default: 2)")
    add(
        "--poll-seconds", type=_within(0.01, 3600, float), default=1.0, metavar="S",
        help="between two looks for new versions (default: 1)",
    )  # fmt: skip


def _within(least: float, most: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return a parser of numbers in a range, for argparse."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    return parse


def run(arguments: Sequence[str], world: Topology, program: str) -> bool:
    """Run the command. Collective. Raises the same error on all ranks. Returns True: it obeys SIGTERM."""
    options = together(world.world, lambda: make_parser(world.rank == 0, program).parse_args(arguments))
    prepared = together(world.world, lambda: _prepared(options) if world.rank == 0 else None)
    try:
        found = root_value(world.world, prepared and prepared.files, "learn the versions of the model")
        models = together(world.world, lambda: _loaded(world, found, prepared))
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


class Prepared(NamedTuple):
    """What rank 0 has before the server starts. found: the files of the versions in a folder; empty for a single
    file."""

    versions: Versions
    listener: socket.socket
    found: dict[int, Found]

    @property
    def files(self) -> list[tuple[int, str, str]]:
        """The number, the path and the digest of each version."""
        listed = [version for version in self.versions.listed() if version.loaded is not None]
        return [(version.number, version.path, version.loaded.digest) for version in listed if version.loaded]


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
    try:
        found = scan(folder)
    except OSError as error:
        raise ModelFileError(f"--model {options.model} can't be read: {error.strerror or error}") from error
    errors = []
    for number in sorted(wanted_of(found, options.keep, versions.canary), reverse=True):
        try:
            loaded = load_alike(found[number].path, [version.model for version in versions.available()])
        except TrainerError as error:
            log.warning("version %d is not served: %s", number, error)
            errors.append(str(error))
        else:
            versions.add(Version(number, found[number].path, AVAILABLE, loaded))
    if not versions.available():
        raise ModelFileError(
            errors[0]
            if errors
            else f"--model {options.model} has no version: expected is a folder 0001, say, with one .npz or .onnx file"
        )
    return {version.number: found[version.number] for version in versions.listed()}


def _loaded(world: Topology, files: Sequence[Any], prepared: Prepared | None) -> dict[int, Model]:
    """On every rank: the models of the versions. Raises ModelFileError if a file differs from rank 0's."""
    if prepared is not None:
        return {version.number: version.model for version in prepared.versions.available()}
    return {number: _same(path, digest) for number, path, digest in files}


def _same(path: str, digest: str) -> Model:
    loaded = load_whole(path)
    if loaded.digest != digest:
        raise ModelFileError(f"{path} is another file here than on rank 0; all ranks must read the same one")
    return loaded.model


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
            self._models[header[LOAD]] = _same(header["path"], header["digest"])
        else:
            self._models.pop(header[UNLOAD], None)
        return {}, []

    def _tell(self) -> None:
        """SIGTERM on this rank ends the server, as on rank 0."""
        if self._sigterm.here and not self._told:
            self._told = True
            self._exchange.send(0, {STOP: True})


# Rank 0


class Local:
    """Rank 0 as a rank that computes: a thread, without MPI, which takes one batch at a time. wake: called after an
    answer."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._work: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Batch, np.ndarray | str]] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def deal(self, batch: Batch) -> None:
        self.busy = True
        self._work.put(batch)

    def answers(self) -> list[tuple[Batch, np.ndarray | str]]:
        """Return what is computed: outputs, or the text of an error."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
            self.busy = False
        return found

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (batch := self._work.get()) is not None:
            try:
                outputs: np.ndarray | str = batch.version.model.predict(batch.input())
            except Exception as error:  # of a model
                outputs = f"{type(error).__name__}: {error}"
            self._done.put((batch, outputs))
            self._wake()


Work = Batch | tuple[str, int, str]


class Peer:
    """Another rank, as rank 0 sees it. has: the versions that it has loaded, with the digests of their files. work:
    what it has not answered: sequence number -> a batch, or (LOAD or UNLOAD, version, digest)."""

    def __init__(self, rank: int, has: dict[int, str]) -> None:
        self.rank, self.has = rank, has
        self.refused: dict[int, str] = {}  # the digests of versions that it can't load
        self.work: dict[int, Work] = {}
        self.since = 0.0  # when the last work was dealt
        self.late = False  # the last work was not answered in time

    @property
    def batches(self) -> list[Batch]:
        return [work for work in self.work.values() if isinstance(work, Batch)]

    def serves(self, version: Version) -> bool:
        """Whether it has the version, and answers in time."""
        return not self.late and self.has.get(version.number) == version.digest

    def can_answer(self, request: Request) -> bool:
        return self.serves(request.version)

    def lacks(self, version: Version) -> bool:
        """Whether it is to load the version."""
        return version.digest not in (self.has.get(version.number), self.refused.get(version.number))


class Server:
    """Rank 0: takes requests from the web thread, and deals batches to the other ranks and to its own thread."""

    def __init__(
        self, options: argparse.Namespace, exchange: Exchange, prepared: Prepared, sigterm: Terminating
    ) -> None:
        self._options, self._exchange, self._versions, self._sigterm = options, exchange, prepared.versions, sigterm
        self._dealer, self._awake = Dealer(exchange), threading.Event()
        self._waiting = Waiting(options.max_queue, options.max_batch, options.max_wait_ms / 1000, self._awake.set)
        self._local = Local(self._awake.set)
        has = {version.number: version.digest for version in self._versions.available()}
        self._peers = {rank: Peer(rank, dict(has)) for rank in range(1, exchange.size)}
        self._metrics = Metrics(self._waiting, self._versions, lambda: len(self._peers) + 1)
        self._news: queue.SimpleQueue[Version | int] = queue.SimpleQueue()  # from the watcher: to load, to unload
        limits = Limits(
            options.max_request_bytes, options.max_rows, options.max_connections, 3 * options.answer_seconds + 1
        )
        pages = Pages(self._versions, self, limits, self._metrics.page, self._metrics.count)
        self._listener = prepared.listener
        self._web = Web(pages, prepared.listener, limits, options.drain_seconds)
        self._watcher = None
        if prepared.found:
            self._watcher = Watcher(
                options.model, self._versions, options.keep, options.poll_seconds, self._tell, self._tell
            )
            self._watcher.start(prepared.found)
        self._draining = False
        self._due = 0.0  # the next turn in which there is something to do, unless something wakes this rank

    def submit(self, version: Version, rows: np.ndarray) -> Any:
        """See web.Service. In the web thread."""
        request = Request(version, rows)
        self._waiting.put(request)
        return request.future

    def _tell(self, news: Version | int) -> None:
        """In the watcher's thread."""
        self._news.put(news)
        self._awake.set()

    def run(self) -> None:
        """Serve until SIGTERM."""
        self._introduce()
        self._web.start()
        try:
            self._exchange.wait(self._turn, pause=self._pause)
        finally:
            self._web.drain()
            self._local.close()
            if self._watcher is not None:
                self._watcher.stop()
        if self._web.error is not None:
            raise TrainerError(f"the web server has ended: {self._web.error!r}") from self._web.error

    def _introduce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        numbers = ", ".join(str(version.number) for version in self._versions.available())
        ranks = f"{self._exchange.size} rank{'s' * (self._exchange.size > 1)}"
        text = f"serving {self._versions.name} (version {numbers}) on {ranks} at "
        print(f"{text}http://{shown}:{port}/v1/models/{self._versions.name}", flush=True)
        if self._exchange.size > 1 and not ulfm.in_force():
            print(
                "a killed rank ends this job; mpirun --with-ft ulfm lets the others go on", file=sys.stderr, flush=True
            )

    # A turn of the loop

    def _turn(self) -> bool:
        """Do what is to be done; True at the end. Most turns find that no rank has answered."""
        now, answers = time.monotonic(), self._dealer.answers()
        if not (answers or self._dealer.told or self._awake.is_set()) and now < self._due:
            return False
        self._awake.clear()
        self._take_answers(answers)
        self._note_lost()
        self._retry_late(now)
        self._learn_of_versions()
        self._stop_if_told()
        self._bring_versions(now)
        self._deal(now)
        waits = self._waiting.rows and not self._local.busy
        self._due = now + (min(IDLE_SECONDS, self._options.max_wait_ms / 2000) if waits else IDLE_SECONDS)
        return self._draining and self._web.ended  # it ends when all are answered, or after --drain-seconds

    def _pause(self, now: float) -> None:
        """Sleep until something wakes this rank, or until it has to look for answers of the others."""
        others = any(peer.work for peer in self._peers.values())
        self._awake.wait(min(BUSY_SECONDS, self._due - now) if others else self._due - now)

    def _take_answers(self, answers: Iterable[Answer]) -> None:
        """answers: of the other ranks."""
        for batch, outputs in self._local.answers():
            failed = isinstance(outputs, str)
            self._finish(batch, None if failed else np.asarray(outputs), str(outputs)[:500] if failed else "")
        for answer in answers:
            peer = self._peers.get(answer.rank)
            work = None if peer is None else peer.work.pop(answer.number, None)
            if peer is None or work is None:
                continue
            if isinstance(work, Batch):
                self._take_batch(work, answer)
            elif answer.header is not None:
                self._take_version(peer, *work, answer.header.get("error", ""))
        for peer in self._peers.values():
            peer.late &= self._dealer.busy(peer.rank) > 0

    def _take_batch(self, batch: Batch, answer: Answer) -> None:
        if answer.header is None:  # the rank is lost
            self._again(batch, f"two ranks in turn were lost; the last one was rank {answer.rank}")
        else:
            self._finish(batch, answer.arrays[0] if answer.arrays else None, answer.header.get("error", ""))

    def _finish(self, batch: Batch, outputs: np.ndarray | None, error: str) -> None:
        if outputs is not None:
            self._metrics.batch(batch.rows)
            batch.answer(outputs)
        elif len(batch.requests) > 1:  # the rows of one of them may be the cause
            self._waiting.again(batch.requests)
        else:
            log.warning("the model has failed: %s", error)
            batch.refuse(500, f"the model has failed: {error}")

    def _again(self, batch: Batch, text: str) -> None:
        """Deal the requests of a batch once more; refuse those that were dealt TRIES times."""
        spent = [request for request in batch.requests if request.tries >= TRIES]
        for request in spent:
            request.refuse(503, f"no rank has answered: {text}", Retry_After="1")
        others = [request for request in batch.requests if request.tries < TRIES]
        self._metrics.retried(len(others))
        self._waiting.again(others)

    def _note_lost(self) -> None:
        for rank in self._exchange.lost & self._peers.keys():
            del self._peers[rank]
            log.warning("rank %d was lost; %d ranks go on", rank, len(self._peers) + 1)

    def _retry_late(self, now: float) -> None:
        """Deal the batches of ranks that take too long to others."""
        for peer in self._peers.values():
            for number, work in list(peer.work.items()):
                limit = self._options.answer_seconds if isinstance(work, Batch) else LOAD_SECONDS
                if now - peer.since < limit:
                    continue
                self._dealer.forget(number)
                del peer.work[number]
                peer.late = True
                log.warning("rank %d has not answered for %.0f s", peer.rank, now - peer.since)
                if isinstance(work, Batch):
                    self._again(work, f"rank {peer.rank} has not answered in {limit:g} s")

    # Versions

    def _learn_of_versions(self) -> None:
        """Take the watcher's news."""
        known = {version.number: version for version in self._versions.listed()}
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Version):
                log.info("version %d is being loaded on %d ranks", news.number, len(self._peers) + 1)
            elif news in known and known[news].state != UNLOADING:
                known[news].state = UNLOADING
                log.warning("version %d is gone, and answers no more requests", news)

    def _bring_versions(self, now: float) -> None:
        """Load and unload versions on the ranks, one rank after the other, and set their states."""
        listed = self._versions.listed()
        wanted = {version.number: version for version in listed if version.state in (LOADING, AVAILABLE)}
        works = [work for peer in self._peers.values() for work in peer.work.values()]
        loading = any(isinstance(work, tuple) and work[0] == LOAD for work in works)
        for peer in self._peers.values():
            peer.refused = {number: digest for number, digest in peer.refused.items() if number in wanted}
            if len(peer.work) > len(peer.batches) or peer.late:
                continue
            for number in peer.has.keys() - wanted.keys():
                if not self._in_use(number):
                    self._deal_to(peer, {UNLOAD: number}, (UNLOAD, number, ""))
            lacking = [version for version in wanted.values() if peer.lacks(version)]
            if lacking and not loading:
                version = lacking[0]
                work = {LOAD: version.number, "path": os.path.abspath(version.path), "digest": version.digest}
                self._deal_to(peer, work, (LOAD, version.number, version.digest))
                loading = True
        for version in listed:
            if version.state == LOADING and all(p.serves(version) for p in self._peers.values() if not p.late):
                version.state = AVAILABLE
                log.warning("version %d answers", version.number)
            if version.state == UNLOADING and not self._in_use(version.number):
                self._versions.drop(version.number)

    def _in_use(self, number: int) -> bool:
        dealt = [batch for peer in self._peers.values() for batch in peer.batches]
        return self._waiting.has(number) or any(batch.version.number == number for batch in dealt) or self._local.busy

    def _take_version(self, peer: Peer, kind: str, number: int, digest: str, error: str) -> None:
        peer.has.pop(number, None)
        if kind == UNLOAD:
            return
        if not error:
            peer.has[number] = digest
            return
        log.warning("rank %d can't load version %d: %s", peer.rank, number, error)
        version = self._versions.known.get(number)
        if version is not None and version.digest == digest and version.state == LOADING:
            if self._watcher is not None:
                self._watcher.refuse(number)
            version.state, version.error = END, f"rank {peer.rank}: {error}"
            log.warning("version %d is not served: %s", number, version.error)
        else:  # the other ranks answer by it
            peer.refused[number] = digest

    # Dealing

    def _deal(self, now: float) -> None:
        """Deal batches to the ranks that have no work, and to rank 0's own thread after them; then full batches to
        ranks that have one, so that they need not wait for the next one."""
        for peer in self._peers.values():
            if not peer.work and not peer.late:
                self._deal_batch(peer, self._waiting.take(now, peer.can_answer, self._draining))
        if not self._local.busy:
            batch = self._waiting.take(now, self._is_for_this_rank, self._draining)
            if batch is not None:
                self._local.deal(self._begun(batch))
        for peer in self._peers.values():
            if len(peer.batches) == len(peer.work) == 1 and not peer.late:
                self._deal_batch(peer, self._waiting.take_full(peer.can_answer))

    def _deal_batch(self, peer: Peer, batch: Batch | None) -> None:
        if batch is not None:
            self._deal_to(peer, {PREDICT: batch.version.number}, self._begun(batch), [batch.input()])

    def _is_for_this_rank(self, request: Request) -> bool:
        """Whether rank 0 computes a request: not one that may have ended a rank, if another rank can."""
        return not (request.tries and any(peer.can_answer(request) for peer in self._peers.values()))

    def _begun(self, batch: Batch) -> Batch:
        for request in batch.requests:
            request.tries += 1
        return batch

    def _deal_to(self, peer: Peer, header: dict[str, Any], work: Work, arrays: Sequence[np.ndarray] = ()) -> None:
        peer.work[self._dealer.deal(peer.rank, header, arrays)] = work
        peer.since = time.monotonic()

    def _stop_if_told(self) -> None:
        told = any(STOP in message.header for message in self._dealer.told)
        self._dealer.told.clear()
        if (told or self._sigterm.here) and not self._draining:
            print("SIGTERM: the last requests are answered", flush=True)
            self._web.drain()
        self._draining |= told or self._sigterm.here or self._web.ended
