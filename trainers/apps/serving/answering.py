"""Answering: rank 0 deals work to the other ranks, or asks all of them, and takes their answers until a deadline.

- Exchange carries messages between rank 0 and each other rank, on a communicator of its own: a JSON header and arrays.
  It never waits for a rank: a rank that has crashed, or that is stopped, holds up nobody.
- Dealer (rank 0) and `answer_requests` (the others): a rank gets work by message, and answers it. The server uses them.
- Rounds: every rank computes its answer by itself, in the same order of calls; rank 0 collects what has come by the
  deadline. `ensemble.predict` uses it.

Work has a sequence number, by which an answer that comes late is recognised and dropped. A rank that crashes is lost,
and the others go on, if MPI lets them live (mpirun --with-ft ulfm). The communicator is not revoked then.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError, RankLostError
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
AHEAD = 16  # calls by which a rank may be ahead of rank 0 (Rounds)
END, BYE, LAST = "end", "bye", "last"  # headers of the end
NUMBER = "number"


class Message(NamedTuple):
    """A received message. header: of JSON types. arrays: new ones, writable."""

    source: int
    header: dict[str, Any]
    arrays: list[np.ndarray]


class _Incoming:
    """The messages of one rank, of which one at a time is being received."""

    def __init__(self, comm: MPI.Intracomm, source: int) -> None:
        self._comm, self._source = comm, source
        self._front: tuple[MPI.Request, np.ndarray] | None = None
        self._requests: list[MPI.Request] = []
        self._message: Message | None = None

    def advance(self) -> Message | None:
        """Return the next message if all of it is there. MPI makes progress here."""
        if self._front is None:
            status = MPI.Status()
            found = self._comm.Improbe(self._source, FRONT, status)
            if found is None:
                return None
            memory = np.empty(_checked(status.Get_count(MPI.BYTE), MOST_FRONT), np.uint8)
            self._front = found.Irecv(memory), memory
        request, memory = self._front
        if self._message is None:
            if not request.Test():
                return None
            self._message = self._begun(memory)
        if not all_done(self._requests):
            return None
        message, self._message, self._front, self._requests = self._message, None, None, []
        return message

    def _begun(self, front: np.ndarray) -> Message:
        """Start to receive the arrays that a front describes."""
        given = json.loads(front.tobytes())
        arrays = [_new(shape, dtype) for shape, dtype in given["arrays"]]
        _checked(sum(array.nbytes for array in arrays), MOST_BYTES)
        self._requests = [self._comm.Irecv(piece, self._source, BODY) for array in arrays for piece in pieces(array)]
        return Message(self._source, given["header"], arrays)

    def abandon(self) -> None:
        """Drop a message that will not come, and keep its memory. Local."""
        free_later((self._front, self._message, self._requests))
        self._front, self._message, self._requests = None, None, []


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
        self._incoming = {rank: _Incoming(self._comm, rank) for rank in others}
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
        """Start to send a message; a lost rank gets none. The arrays must not change any more: copy those that may.

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
                while (message := self._incoming[rank].advance()) is not None:
                    if not self._is_of_the_end(message):
                        found.append(message)
            except MPI.Exception as error:
                self._lose(rank, error)
        self._look()
        return found

    def wait(
        self, done: Callable[[], bool], seconds: float = math.inf, pause: Callable[[float], object] | None = None
    ) -> bool:
        """Call `done`, which calls `poll`, until it returns True; False after some seconds. pause: see `wait_until`."""
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
        liveness.declare_gone()
        for rank in set(ulfm.failed(self._comm)) & set(self.living):
            self._lose(rank, None)

    def _lose(self, rank: int, error: Exception | None) -> None:
        """Note that a rank is lost. Raises the error where the job can't do without it."""
        if error is not None and not ulfm.in_force():
            raise error
        self.lost.add(rank)
        self._incoming[rank].abandon()
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
        """Tell the others that this rank ends, and return whether all ranks do, the same on each that is asked."""
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


# Work that rank 0 deals


class Answer(NamedTuple):
    """An answer to dealt work. header: None if the rank was lost before it answered."""

    number: int
    rank: int
    header: dict[str, Any] | None
    arrays: list[np.ndarray]


class Dealer:
    """Rank 0: deals work to the other ranks and takes their answers. Local; made after an Exchange.

    Attributes: late: the number of answers that came after `forget`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._number = self.late = 0
        self._open: dict[int, int] = {}  # sequence number -> rank
        self._forgotten: dict[int, int] = {}
        self.told: list[Message] = []  # messages that are no answers, oldest first; take and clear them

    def deal(self, rank: int, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> int:
        """Start to send work to a rank; returns its sequence number. The arrays must not change until the answer."""
        self._number += 1
        self._open[self._number] = rank
        self.exchange.send(rank, {**header, NUMBER: self._number}, arrays)
        return self._number

    def busy(self, rank: int) -> int:
        """Return how much work a rank has not answered, with what is forgotten."""
        return sum(each == rank for each in [*self._open.values(), *self._forgotten.values()])

    def forget(self, number: int) -> None:
        """Drop the answer to this work when it comes. The rank is busy until then."""
        if number in self._open:
            self._forgotten[number] = self._open.pop(number)

    def answers(self) -> list[Answer]:
        """Return the answers that have come, and one without a header for each work of a rank that was lost."""
        found = []
        for message in self.exchange.poll():
            number = message.header.pop(NUMBER, None)
            if number is None:
                self.told.append(message)
            elif self._open.pop(number, None) is not None:
                found.append(Answer(number, message.source, message.header, message.arrays))
            else:
                self.late += self._forgotten.pop(number, None) is not None
        lost = self.exchange.lost
        for number in [number for number, rank in self._open.items() if rank in lost]:
            found.append(Answer(number, self._open.pop(number), None, []))
        self._forgotten = {number: rank for number, rank in self._forgotten.items() if rank not in lost}
        return found


Handle = Callable[[dict[str, Any], list[np.ndarray]], tuple[dict[str, Any], list[np.ndarray]]]


def answer_requests(exchange: Exchange, handle: Handle, meanwhile: Callable[[], object] | None = None) -> None:
    """Every rank but 0: answer the work that rank 0 deals, until rank 0 ends. Local.

    handle: takes the header and the arrays of some work, and returns those of its answer. An exception becomes an
        answer {"error": its text}. meanwhile: called between two polls.

    Raises RankLostError if rank 0 is lost.
    """
    inbox: list[Message] = []

    def come() -> bool:
        inbox.extend(exchange.poll())
        if meanwhile is not None:
            meanwhile()
        return bool(inbox or exchange.ended or exchange.lost)

    while True:
        exchange.wait(come)
        if exchange.ended:
            return
        if not inbox:
            error = RankLostError("rank 0, which deals the work, was lost")
            error.lost = (0,)
            raise error
        message = inbox.pop(0)
        number = message.header.pop(NUMBER, None)
        try:
            header, arrays = handle(message.header, message.arrays)
        except Exception as error:  # of a model, say: this rank still answers other work
            header, arrays = {"error": f"{type(error).__name__}: {error}"}, []
        exchange.send(0, {**header, NUMBER: number}, arrays)


# Answers to calls that every rank makes


class Rounds:
    """Answers of all ranks to calls that each of them makes by itself, in the same order; rank 0 collects them.

    Made on all ranks after an Exchange. Each call has a round; its number is equal on all ranks. `begin` begins it, and
    MPI makes progress in `take`, `over`, `send` and `collect`.

    Attributes: number: of the last round. late: how many answers rank 0 has dropped.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.number = self.late = 0
        # answers to rounds that rank 0 has not ended: number of the round -> rank -> answer
        self._held: dict[int, dict[int, Message]] = {}
        self._ended = 0  # the last round that rank 0 has ended, as far as this rank knows
        self._told: dict[int, int] = {}  # rank 0: rank -> the last round of whose end it was told

    def begin(self) -> None:
        """Begin the next round, before this rank computes its answer."""
        self.number += 1
        if self.exchange.rank == 0:
            self._ended = self.number - 1
            self._held = {number: held for number, held in self._held.items() if number > self._ended}
        self.take()

    def take(self) -> None:
        """Take the messages that have come: on rank 0 answers, on another rank the number of the last ended round."""
        for message in self.exchange.poll():
            number = message.header.get(NUMBER, 0)
            if self.exchange.rank:
                self._ended = max(self._ended, number)
            elif number > self._ended:
                self._held.setdefault(number, {})[message.source] = message
            else:
                self.late += NUMBER in message.header
        if self.exchange.rank == 0:
            self._tell()

    @property
    def over(self) -> bool:
        """Whether rank 0 has ended this round, so that an answer is of no use: this rank was late or stopped."""
        self.take()
        return self._ended >= self.number

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Every rank but 0: answer this round. Waits if this rank is far ahead of rank 0.

        Raises RankLostError if rank 0 is lost.
        """
        self.exchange.wait(self._near)
        if self.exchange.lost:
            error = RankLostError("rank 0, which collects the answers, was lost")
            error.lost = (0,)
            raise error
        self.exchange.send(0, {**header, NUMBER: self.number}, arrays)

    def _near(self) -> bool:
        self.take()
        exchange = self.exchange
        return bool(self.number - self._ended <= AHEAD or exchange.ended or exchange.lost)

    def collect(
        self,
        deadline: float,
        wanted: Collection[int] | None = None,
        enough: Callable[[dict[int, Message]], bool] | None = None,
    ) -> dict[int, Message]:
        """Rank 0: end the round, and return its answers by rank. Waits for the living ranks until `deadline`.

        deadline: by time.monotonic(). wanted: the ranks whose answers are awaited, by default all others. enough: ends
            the wait, given the answers that have come. The ranks that are missing in the result are late or lost.
        """
        ranks = set(range(1, self.exchange.size) if wanted is None else wanted)
        found = self._held.setdefault(self.number, {})

        def done() -> bool:
            self.take()
            return found.keys() >= ranks - self.exchange.lost or (enough is not None and enough(found))

        self.exchange.wait(done, max(0.0, deadline - time.monotonic()), Pause(1e-3, 2e-4))
        self.end()
        return found

    def end(self) -> None:
        """Rank 0: end the round, as `collect` does; without it the others wait when they are far ahead."""
        self._ended = self.number
        self._held.pop(self.number, None)
        self._tell()

    def _tell(self) -> None:
        """Rank 0: tell the others which round has ended. A rank that takes no messages gets no more of them: when it
        takes them again, it gets the newest number."""
        for rank in self.exchange.living:
            if self._told.get(rank, 0) < self._ended and not self.exchange.unsent(rank):
                self.exchange.send(rank, {NUMBER: self._ended})
                self._told[rank] = self._ended
