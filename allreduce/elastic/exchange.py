"""Exchange: messages between rank 0 and each other rank, which wait for no rank: one that is stopped, or that has
crashed, holds up nobody. It is for programs on top of the trainers, such as a server.

A message has a JSON header and arrays. A rank that crashes is lost, and the others go on, if MPI lets them live
(mpirun --with-ft ulfm). The communicator is not revoked then.
"""

import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.topology import Topology
from allreduce.transport import liveness, ulfm
from allreduce.transport.chunked import pieces
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import Pause, all_done, wait_until, waiting

FRONT, BODY = 1, 2  # tags: the header with the shapes of the arrays; the bytes of the arrays
MOST_FRONT = 1 << 24  # bytes of a header that are accepted
MOST_BYTES = 1 << 36  # of the arrays of a message
LOOK_SECONDS = 0.25  # between two searches for processes that have ended
CLOSE_SECONDS = 5.0  # how long rank 0 waits for the others when it closes
PAUSE = 5e-4, 1e-3  # (eager, longest sleep) between two polls
END, BYE, LAST = "end", "bye", "last"  # headers of the end


class Message(NamedTuple):
    """A received message. header: of JSON types. arrays: new ones, writable."""

    source: int
    header: dict[str, Any]
    arrays: list[np.ndarray]


def _receive(comm: MPI.Intracomm, source: int) -> Generator[Message | None, None, None]:
    """Yield the messages of a rank, one after the other; None while the next one is not complete. MPI makes progress
    here. `close` drops a message that will not come, and keeps its memory."""
    held: list[Any] = []  # into which MPI may still write
    try:
        while True:
            status = MPI.Status()
            while (found := comm.Improbe(source, FRONT, status)) is None:
                yield None
            memory = np.empty(_checked(status.Get_count(MPI.BYTE), MOST_FRONT), np.uint8)
            requests = [found.Irecv(memory)]
            held += [memory, requests]
            while not all_done(requests):
                yield None
            front = json.loads(memory.tobytes())
            arrays = [_new(shape, dtype) for shape, dtype in front["arrays"]]
            _checked(sum(array.nbytes for array in arrays), MOST_BYTES)
            requests = [comm.Irecv(piece, source, BODY) for array in arrays for piece in pieces(array)]
            held += [arrays, requests]
            while not all_done(requests):
                yield None
            held.clear()
            yield Message(source, front["header"], arrays)
    except BaseException:  # `close` raises GeneratorExit
        if held:
            free_later(held)
        raise


def _new(shape: Any, dtype: Any) -> np.ndarray:
    found = np.dtype(dtype)
    if found.kind not in "biufcS" or not all(type(size) is int and size >= 0 for size in shape):
        raise CommunicationError(f"a rank has sent the header of an array {shape} of {dtype}")
    _checked(math.prod(shape) * found.itemsize, MOST_BYTES)
    return np.empty(shape, found)


def _checked(size: int, most: int) -> int:
    if not 0 <= size <= most:
        raise CommunicationError(f"a rank has sent a message of {size} bytes; the most are {most}")
    return size


class Exchange:
    """Messages between rank 0 and each other rank. The constructor and `close` are collective; all else is local.

    topology: its ranks. Use an Exchange in one thread.

    Attributes: rank, size; lost: the ranks that are known to be lost; ended: whether rank 0 has closed it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        with waiting(topology.world, "make a communicator for answers"):
            # not one of the topology's `private`: these are revoked when any rank fails
            self._comm = topology.world.Dup()
        self.rank, self.size = topology.rank, topology.size
        self.lost: set[int] = set()
        others = range(1, self.size) if self.rank == 0 else (0,)
        self._incoming = {rank: _receive(self._comm, rank) for rank in others}
        self._sends: dict[int, list[tuple[list[MPI.Request], Any]]] = {rank: [] for rank in others}
        self._looked, self.closed, self.ended = time.monotonic(), False, False
        self._byes: set[int] = set()  # the ranks that have closed it
        self._last: bool | None = None  # by rank 0: whether all ranks have closed it
        topology.register(self)

    @property
    def living(self) -> list[int]:
        """The ranks with which this one exchanges messages, without those that are lost."""
        return [rank for rank in self._incoming if rank not in self.lost]

    def send(self, rank: int, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Start to send a message; a lost rank gets none. Do not change the arrays afterwards: pass copies instead.

        From rank 0 to any rank, or to rank 0.
        """
        if rank in self.lost:
            return
        whole = [np.ascontiguousarray(array) for array in arrays]
        front = {"header": header, "arrays": [[list(array.shape), array.dtype.str] for array in arrays]}
        memory = np.frombuffer(json.dumps(front).encode(), np.uint8)
        try:
            requests = [self._comm.Isend(memory, rank, FRONT)]
            requests += [self._comm.Isend(piece, rank, BODY) for array in whole for piece in pieces(array)]
        except MPI.Exception as error:
            self._lose(rank, error)
        else:
            self._sends[rank].append((requests, (memory, whole)))

    def unsent(self, rank: int) -> int:
        """Return how many messages to a rank are not sent yet."""
        return len(self._sends[rank])

    def poll(self) -> list[Message]:
        """Return the messages that have come. MPI makes progress here, also for what is being sent."""
        found = []
        for rank in self.living:
            try:
                self._sends[rank] = [each for each in self._sends[rank] if not all_done(each[0])]
                while (message := next(self._incoming[rank], None)) is not None:
                    if not self._is_of_the_end(message):
                        found.append(message)
            except MPI.Exception as error:
                self._lose(rank, error)
        self._look()
        return found

    def wait(
        self, done: Callable[[], bool], seconds: float = math.inf, pause: Callable[[float], object] | None = None
    ) -> bool:
        """Call `done`, which calls `poll`, until it returns True; False after some seconds.

        pause: see `wait_until`.
        """
        return wait_until(done, seconds, pause=pause or Pause(*PAUSE))

    def _is_of_the_end(self, message: Message) -> bool:
        header = message.header
        if BYE in header:
            self._byes.add(message.source)
        if LAST in header:
            self._last = header[LAST] is True
        self.ended |= END in header
        return bool({BYE, LAST, END} & header.keys())

    def _look(self) -> None:
        """Look for ranks that have ended, some of which MPI does not report by itself."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or not ulfm.in_force():
            return
        self._looked = now
        liveness.look()
        for rank in set(ulfm.failed(self._comm)) & set(self.living):
            self._lose(rank, None)

    def _lose(self, rank: int, error: Exception | None) -> None:
        """Note that a rank is lost. Without ULFM the job can't go on: then raise `error`."""
        if error is not None and not ulfm.in_force():
            raise error
        self.lost.add(rank)
        self._incoming[rank].close()
        free_later(self._sends[rank])
        self._sends[rank] = []

    # The end

    def close(self) -> None:
        """End the exchange. Collective, but a rank that is lost or stopped holds up the others for CLOSE_SECONDS at
        most."""
        if self.closed:
            return
        self.closed = True
        self._topology.unregister(self)
        if self._ended_by_all():
            self._comm.Free()
        else:
            free_later((self._comm, self._sends, self._incoming))

    def _ended_by_all(self) -> bool:
        """Tell the others that this rank ends. Return whether all ranks do, the same on all ranks that answer."""
        if self.rank:
            self.send(0, {BYE: True})
            self.wait(lambda: not self.poll() and (self._last is not None or bool(self.lost)), self._topology.timeout)
            return self._last is True
        for rank in self.living:
            self.send(rank, {END: True})
        self.wait(lambda: not self.poll() and self._byes >= set(self.living), CLOSE_SECONDS)
        whole = len(self._byes) == self.size - 1
        for rank in self.living:  # also to late ranks, which then do not wait for rank 0
            self.send(rank, {LAST: whole})
        self.wait(lambda: not (self.poll() or any(map(self.unsent, self._byes - self.lost))), CLOSE_SECONDS)
        return whole

    def abandon(self) -> None:
        """Drop everything without communication. Local."""
        self.closed = True
        free_later((self._comm, self._sends, self._incoming))
