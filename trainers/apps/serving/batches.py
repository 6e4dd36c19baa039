"""Batches of requests: the queue in which requests wait, and what becomes of a batch. No MPI."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from trainers.apps.serving.versions import Version
from trainers.apps.serving.web import RefusedError

Key = tuple[int, str, tuple[int, ...]]
TRIES = 2  # of a request, on different ranks


@dataclass(eq=False)
class Request:
    """Rows that wait for an answer. tries: how often they were dealt to a rank. since: by time.monotonic()."""

    version: Version
    rows: np.ndarray
    future: "Future[np.ndarray]" = field(default_factory=Future)
    tries: int = 0
    since: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Key:
        """Requests with equal keys fit in one batch."""
        return self.version.number, self.version.stamp, self.rows.shape[1:]

    def answer(self, outputs: np.ndarray) -> None:
        with suppress(InvalidStateError):  # the client has not waited as long
            self.future.set_result(outputs)

    def refuse(self, code: int, text: str, **headers: str) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(RefusedError(code, text, **headers))


@dataclass(eq=False)
class Batch:
    """Requests that are computed together."""

    requests: list[Request]

    @property
    def version(self) -> Version:
        return self.requests[0].version

    @property
    def rows(self) -> int:
        return sum(len(request.rows) for request in self.requests)

    def input(self) -> np.ndarray:
        if len(self.requests) == 1:
            return self.requests[0].rows
        return np.concatenate([request.rows for request in self.requests])

    def answer(self, outputs: np.ndarray) -> None:
        """Give each request its rows of the outputs."""
        if len(outputs) != self.rows:
            self.refuse(500, f"the model has given {len(outputs)} rows for {self.rows}")
            return
        start = 0
        for request in self.requests:
            request.answer(outputs[start : start + len(request.rows)])
            start += len(request.rows)

    def refuse(self, code: int, text: str, **headers: str) -> None:
        for request in self.requests:
            request.refuse(code, text, **headers)


class Waiting:
    """The requests that wait to be dealt. `put` may be called from any thread.

    most_rows: that may wait. max_batch: rows of a batch, unless one request has more. seconds: that a request waits for
        others to fill its batch. wake: called when a first request waits, and when a batch is full.
    """

    def __init__(self, most_rows: int, max_batch: int, seconds: float, wake: Callable[[], object]) -> None:
        self._most, self._max_batch, self._seconds, self._wake = most_rows, max_batch, seconds, wake
        self._queues: dict[Key, deque[Request]] = {}
        self._again: deque[Request] = deque()  # requests that were dealt before; each is a batch
        self._lock = threading.Lock()
        self.rows = 0

    def put(self, request: Request) -> None:
        """Add a request. Raises RefusedError if too many rows wait."""
        with self._lock:
            if self.rows and self.rows + len(request.rows) > self._most:
                raise RefusedError(
                    429, f"{self.rows} rows wait already, and at most {self._most} may (--max-queue)", Retry_After="1"
                )
            self.rows += len(request.rows)
            queue = self._queues.setdefault(request.key, deque())
            queue.append(request)
            is_due = len(queue) == 1 or self._is_full(queue)
        if is_due:
            self._wake()

    def again(self, requests: Sequence[Request]) -> None:
        """Put requests of a batch that has failed before all others, each in a batch of its own."""
        with self._lock:
            for request in requests:
                self.rows += len(request.rows)
            self._again.extend(requests)

    def has(self, version: int) -> bool:
        """Whether a request of a version waits."""
        with self._lock:
            queued = any(number == version for number, *_ in self._queues)
            return queued or any(request.version.number == version for request in self._again)

    def take(self, now: float, fits: Callable[[Request], bool], at_once: bool = False) -> Batch | None:
        """Return the next batch that is full or has waited long enough; None if there is none. fits: whether the rank
        that takes it has what the request needs."""
        with self._lock:
            for request in list(self._again):
                if request.future.done() or fits(request):
                    self._again.remove(request)
                    self.rows -= len(request.rows)
                    if not request.future.done():
                        return Batch([request])
            key = self._next(now, at_once, fits)
            return None if key is None else self._filled(key)

    def take_full(self, fits: Callable[[Request], bool]) -> Batch | None:
        """Return the next batch for a rank that still computes another one, if the batch is full; else None. Requests
        that were dealt before have to wait for a rank without work, so while one of them fits there is no batch."""
        with self._lock:
            if any(map(fits, self._again)):
                return None
            key = self._next(-math.inf, False, fits)
            return None if key is None else self._filled(key)

    def _next(self, now: float, at_once: bool, fits: Callable[[Request], bool]) -> Key | None:
        """Return the key of the oldest batch that is due."""
        best: Key | None = None
        since = math.inf
        for key, queue in list(self._queues.items()):
            while queue and queue[0].future.done():  # the client has gone, or has waited for too long
                self.rows -= len(queue.popleft().rows)
            if not queue:
                del self._queues[key]
                continue
            head = queue[0]
            due = at_once or now - head.since >= self._seconds or self._is_full(queue)
            if due and head.since <= since and fits(head):
                best, since = key, head.since
        return best

    def _is_full(self, queue: deque[Request]) -> bool:
        rows = 0
        for request in queue:
            rows += len(request.rows)
            if rows >= self._max_batch:
                return True
        return False

    def _filled(self, key: Key) -> Batch:
        queue, rows = self._queues[key], 0
        requests: list[Request] = []
        while queue and (not requests or rows + len(queue[0].rows) <= self._max_batch):
            request = queue.popleft()
            self.rows -= len(request.rows)
            if not (requests and request.future.done()):
                requests.append(request)
                rows += len(request.rows)
        if not queue:
            del self._queues[key]
        return Batch(requests)
