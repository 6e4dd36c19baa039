"""Rank 0 of the server: Server deals batches of requests, and versions, to the other ranks and to its own thread."""

import argparse
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from allreduce.elastic.exchange import Exchange, Message
from allreduce.elastic.ranks import survives
from trainers.apps.serving.answering import NUMBER
from trainers.apps.serving.batches import TRIES, Batch, Request, Waiting
from trainers.apps.serving.metrics import Metrics
from trainers.apps.serving.versions import AVAILABLE, END, LOADING, UNLOADING, Found, Version, Versions, Watcher
from trainers.apps.serving.web import Limits, Pages, Web
from trainers.errors import TrainerError
from trainers.recovery.terminating import Terminating

log = logging.getLogger("trainers")

IDLE_SECONDS, BUSY_SECONDS = 0.02, 1e-3  # longest pauses of rank 0: without work, and while ranks compute
LOAD_SECONDS = 60.0  # after which another rank may load a version, too
PREDICT, LOAD, UNLOAD, STOP = "predict", "load", "unload", "stop"  # names in headers of work


class Prepared(NamedTuple):
    """What rank 0 has before the server starts. found: the files of the versions in a folder; empty for a single
    file."""

    versions: Versions
    listener: socket.socket
    found: dict[int, Found]

    @property
    def files(self) -> list[tuple[int, str, str]]:
        """The number, the path and the stamp of each version."""
        listed = self.versions.listed()
        return [(version.number, version.path, version.stamp) for version in listed if version.stamp]


class Change(NamedTuple):
    """A version that a rank loads or unloads. stamp: of the file that it loads; "" to unload."""

    version: int
    stamp: str


class Peer:
    """Another rank, as rank 0 sees it. has: the stamps of the versions that it has loaded, by their numbers. work: the
    work that it has not answered, by sequence numbers. forgotten: the numbers of late work, whose answers are dropped.
    """

    def __init__(self, rank: int, has: dict[int, str]) -> None:
        self.rank, self.has = rank, has
        self.refused: dict[int, str] = {}  # the stamps of versions that it can't load
        self.work: dict[int, Batch | Change] = {}
        self.forgotten: set[int] = set()
        self.since = 0.0  # when it was last dealt work, or has answered
        self.late = False  # the last work was not answered in time

    @property
    def batches(self) -> list[Batch]:
        return [work for work in self.work.values() if isinstance(work, Batch)]

    @property
    def changes(self) -> bool:
        """Whether it loads or unloads a version."""
        return any(isinstance(work, Change) for work in self.work.values())

    def holds(self, version: Version) -> bool:
        """Whether it has this version, and answers in time."""
        return self.has.get(version.number) == version.stamp and not self.late

    def can_answer(self, request: Request) -> bool:
        return self.holds(request.version)


def _compute(future: "Future[np.ndarray]", predict: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> None:
    """Compute a batch. In a daemon thread: a model that hangs does not keep the program from ending."""
    try:
        future.set_result(predict(rows))
    except BaseException as error:  # of any model; it is the answer
        future.set_exception(error)


class Server:
    """Rank 0: takes requests from the web thread, and deals batches to the other ranks and to its own thread."""

    def __init__(
        self, options: argparse.Namespace, exchange: Exchange, prepared: Prepared, sigterm: Terminating
    ) -> None:
        self._options, self._exchange, self._versions, self._sigterm = options, exchange, prepared.versions, sigterm
        self._dealt, self._awake = 0, threading.Event()  # how much work was dealt to other ranks
        self._waiting = Waiting(options.max_queue, options.max_batch, options.max_wait_ms / 1000, self._awake.set)
        self._computed: dict[Future[np.ndarray], Batch] = {}  # by rank 0, and not answered
        has = {version.number: version.stamp for version in self._versions.available()}
        self._peers = {rank: Peer(rank, dict(has)) for rank in range(1, exchange.size)}
        self._metrics = Metrics(self._waiting, self._versions, lambda: len(self._peers) + 1)
        limits = Limits(
            options.max_request_bytes, options.max_rows, options.max_connections, 3 * options.answer_seconds + 1
        )
        pages = Pages(self._versions, self.submit, limits, self._metrics.page, self._metrics.count)
        self._listener = prepared.listener
        self._web = Web(pages, prepared.listener, limits, options.drain_seconds)
        self._watcher = None
        if prepared.found:
            self._watcher = Watcher(options.model, self._versions, options.keep, options.poll_seconds, self._awake.set)
            self._watcher.start(prepared.found)
        self._draining = False
        self._due = 0.0  # the next turn in which there is something to do, unless something wakes this rank

    def submit(self, version: Version, rows: np.ndarray) -> Any:
        """See web.Pages. In the web thread."""
        request = Request(version, rows)
        self._waiting.put(request)
        return request.future

    def run(self) -> None:
        """Serve until SIGTERM."""
        self._introduce()
        self._web.start()
        try:
            self._exchange.wait(self._turn, pause=self._pause)
        finally:
            self._web.drain()
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
        if self._exchange.size > 1 and not survives():
            end = "a killed rank ends this job; mpirun --with-ft ulfm lets the others go on"
            print(end, file=sys.stderr, flush=True)

    # A turn of the loop

    def _turn(self) -> bool:
        """Take the answers that have come, and deal the waiting batches; True at the end. Most turns find no answer."""
        now, messages = time.monotonic(), self._exchange.poll()
        if not (messages or self._awake.is_set()) and now < self._due:
            return False
        self._awake.clear()
        self._take_computed()
        for message in messages:
            self._take_answer(message)
        self._note_lost()
        self._retry_late(now)
        self._stop_if_told(any(STOP in message.header for message in messages))
        self._bring_versions()
        self._deal(now)
        has_room = not self._computed or not all(peer.work or peer.late for peer in self._peers.values())
        waits = self._waiting.rows and has_room
        self._due = now + (min(IDLE_SECONDS, self._options.max_wait_ms / 2000) if waits else IDLE_SECONDS)
        return self._draining and self._web.ended  # it ends when all are answered, or after --drain-seconds

    def _pause(self, now: float) -> None:
        """Sleep until something wakes this rank, or until it has to look for answers of the others."""
        others = any(peer.work and not peer.late for peer in self._peers.values())
        self._awake.wait(min(BUSY_SECONDS, self._due - now) if others else self._due - now)

    def _take_computed(self) -> None:
        """Take what rank 0 has computed."""
        for future in [each for each in self._computed if each.done()]:
            batch, failure = self._computed.pop(future), future.exception()
            if failure is not None:
                self._fail(batch, f"{type(failure).__name__}: {failure}")
            else:
                self._answer(batch, future.result())

    def _take_answer(self, message: Message) -> None:
        """Take an answer of another rank."""
        peer, number = self._peers.get(message.source), message.header.get(NUMBER)
        if peer is None or number is None:
            return
        work, peer.since, error = peer.work.pop(number, None), time.monotonic(), message.header.get("error", "")
        peer.forgotten.discard(number)
        peer.late &= bool(peer.work or peer.forgotten)
        if isinstance(work, Change):
            self._take_change(peer, work, error)
        elif work is not None and error:
            self._fail(work, error)
        elif work is not None:
            self._answer(work, message.arrays[0])

    def _answer(self, batch: Batch, outputs: np.ndarray) -> None:
        self._metrics.batch(batch.rows)
        batch.answer(outputs)

    def _fail(self, batch: Batch, error: str) -> None:
        if len(batch.requests) > 1:  # the rows of one of them may be the cause
            self._waiting.again(batch.requests)
        else:
            log.warning("the model has failed: %s", error)
            batch.refuse(500, f"the model has failed: {error}")

    def _again(self, batch: Batch, text: str) -> None:
        """Deal the requests of a batch once more; refuse a request that was dealt TRIES times."""
        spent = [request for request in batch.requests if request.tries >= TRIES]
        for request in spent:
            request.refuse(503, f"no rank has answered: {text}", Retry_After="1")
        others = [request for request in batch.requests if request.tries < TRIES]
        self._metrics.retried(len(others))
        self._waiting.again(others)

    def _note_lost(self) -> None:
        for rank in self._exchange.lost & self._peers.keys():
            lost = self._peers.pop(rank)
            log.warning("rank %d was lost; ranks that go on: %d", rank, len(self._peers) + 1)
            for batch in lost.batches:
                self._again(batch, f"two ranks in turn were lost; the last one was rank {rank}")

    def _retry_late(self, now: float) -> None:
        """Deal the batches of ranks that take too long to others. A version that such a rank loads is awaited."""
        for peer in self._peers.values():
            for number, work in list(peer.work.items()):
                limit = LOAD_SECONDS if isinstance(work, Change) else self._options.answer_seconds
                if now - peer.since < limit or (peer.late and isinstance(work, Change)):
                    continue
                peer.late = True
                log.warning("rank %d has not answered for %.0f s", peer.rank, now - peer.since)
                if isinstance(work, Batch):
                    del peer.work[number]
                    peer.forgotten.add(number)
                    self._again(work, f"rank {peer.rank} has not answered in {limit:g} s")

    # Versions

    def _bring_versions(self) -> None:
        """Load and unload versions on the ranks, one rank after the other, and set their states."""
        listed = self._versions.listed()
        wanted = {version.number: version for version in listed if version.state in (LOADING, AVAILABLE)}
        loading = any(
            isinstance(work, Change) and work.stamp
            for peer in self._peers.values()
            for work in peer.work.values()
            if not peer.late
        )
        for peer in self._peers.values():
            peer.refused = {number: stamp for number, stamp in peer.refused.items() if number in wanted}
            if peer.changes or peer.late:
                continue
            for number in peer.has.keys() - wanted.keys():
                if not self._in_use(number):
                    self._deal_to(peer, {UNLOAD: number}, Change(number, ""))
            for version in wanted.values():
                number, stamp = version.number, version.stamp
                if not loading and stamp not in (peer.has.get(number), peer.refused.get(number)):
                    self._deal_to(peer, {LOAD: number, "path": version.path, "stamp": stamp}, Change(number, stamp))
                    loading = True
        for version in listed:
            held = all(peer.holds(version) for peer in self._peers.values() if not peer.late)
            if held and self._versions.move(version, (LOADING,), AVAILABLE):
                log.warning("version %d answers", version.number)
            if version.state == UNLOADING and not self._in_use(version.number):
                self._versions.drop(version.number)

    def _in_use(self, number: int) -> bool:
        dealt = [*self._computed.values(), *(batch for peer in self._peers.values() for batch in peer.batches)]
        return self._waiting.has(number) or any(batch.version.number == number for batch in dealt)

    def _take_change(self, peer: Peer, change: Change, error: str) -> None:
        number = change.version
        peer.has.pop(number, None)
        if not change.stamp:
            return
        if not error:
            peer.has[number] = change.stamp
            return
        log.warning("rank %d can't load version %d: %s", peer.rank, number, error)
        version = self._versions.known.get(number)
        if (
            version is not None
            and version.stamp == change.stamp
            and self._versions.move(version, (LOADING,), END, f"rank {peer.rank}: {error}")
        ):
            log.warning("version %d is not served: %s", number, version.error)
        else:  # the other ranks answer by it
            peer.refused[number] = change.stamp

    # Dealing

    def _deal(self, now: float) -> None:
        """Deal batches to the ranks that have no work, and to rank 0's own thread after them; then full batches to
        ranks that have one, so that they need not wait for the next one."""
        for peer in self._peers.values():
            if not peer.work and not peer.late:
                self._deal_batch(peer, self._waiting.take(now, peer.can_answer, self._draining))
        if not self._computed:
            batch = self._waiting.take(now, self._is_for_this_rank, self._draining)
            if batch is not None:
                future: Future[np.ndarray] = Future()
                future.add_done_callback(lambda _: self._awake.set())
                self._computed[future] = batch
                work = future, self._begun(batch).version.model.predict, batch.input()
                threading.Thread(target=_compute, args=work, daemon=True).start()
        for peer in self._peers.values():
            if len(peer.batches) == 1 and not peer.changes and not peer.late:
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

    def _deal_to(
        self, peer: Peer, header: dict[str, Any], work: Batch | Change, arrays: Sequence[np.ndarray] = ()
    ) -> None:
        """Start to send work to a rank. The arrays must not change until the answer."""
        self._dealt += 1
        self._exchange.send(peer.rank, {**header, NUMBER: self._dealt}, arrays)
        peer.work[self._dealt], peer.since = work, time.monotonic()

    def _stop_if_told(self, told: bool) -> None:
        """Begin to end after SIGTERM. told: another rank has received it."""
        if (told or self._sigterm.here) and not self._draining:
            print("SIGTERM: the last requests are answered", flush=True)
            self._web.drain()
        self._draining |= told or self._sigterm.here or self._web.ended
