"""Messages between workers and servers: their memory (Message), the server's side (Mailbox) and the worker's side
(Client)."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import NamedCall, all_done, checking, wait_until
from trainers.stopwatch import Stopwatch

ASK, PUSH, REPLY, PARAMETERS = 1, 2, 3, 4  # tags
UNIT = 64  # bytes; counts of messages are multiples of it, so that they fit a C int


class Header(NamedTuple):
    """The header of a message: int64 fields.

    kind: one of the constants below that belong to the message's tag. step: the step, or the number of the dealt part.
    version: the number of updates in the parameters that the message carries, or that its gradients were computed with.
    halt: nonzero asks to end the epoch: STOP, because a callback asked for it; FAILED, because of an error. taken: the
    pushes that the first server had processed when it dealt the part; others reply once they have processed as many.
    """

    kind: int = 0
    step: int = 0
    version: int = 0
    halt: int = 0
    taken: int = 0


def check(header: Header, tag: int, parts: int, version: int) -> None:
    """Raise CommunicationError if `header` is not a valid header from a worker in this epoch. Local.

    parts: the number of parts in the epoch. version: this server's version, the largest that a worker can have.
    """
    right = 0 <= header.taken <= parts
    if tag == PUSH and header.kind != BYE:
        right = (
            header.kind in (GRADIENTS, NOTHING, ENDED) and 0 <= header.step < parts and 0 <= header.version <= version
        )
    if not right:
        raise CommunicationError(f"a worker has sent {header} in an epoch of {parts} parts, after {version} updates")


# kinds of a push: with gradients; without; the worker's last one in an epoch; without, because its stream has ended
GRADIENTS, NOTHING, BYE, ENDED = range(4)
WORK, END = range(2)  # kinds of a reply: parameters for a part; the epoch is over
STOP, FAILED = 1, 2  # values of `halt`


class Message:
    """The memory of one message: header, metrics, body.

    measures: the number of metrics (float64) after the header. length, dtype: of `body`, the 1-D array after the
        metrics.
    """

    def __init__(self, measures: int, length: int, dtype: np.dtype) -> None:
        headers = len(Header._fields)
        self._front = _units(8 * (headers + measures))
        self._memory = np.zeros(UNIT * (self._front + _units(length * dtype.itemsize)), np.uint8)
        self._head = self._memory[: 8 * headers].view(np.int64)
        self.measures = self._memory[8 * headers : 8 * (headers + measures)].view(np.float64)
        start = UNIT * self._front
        self.body = self._memory[start : start + length * dtype.itemsize].view(dtype)

    @property
    def header(self) -> Header:
        return Header(*self._head.tolist())

    @header.setter
    def header(self, header: Header) -> None:
        self._head[:] = header

    def mpi_buffer(self, with_body: bool = True) -> tuple[np.ndarray, int, MPI.Datatype]:
        """Return (memory, count, datatype) for MPI. Receives are always posted with the body."""
        return self._memory, self._memory.size // UNIT if with_body else self._front, unit_type()


@cache
def unit_type() -> MPI.Datatype:
    """The MPI datatype of UNIT bytes; created once."""
    return MPI.BYTE.Create_contiguous(UNIT).Commit()


def _units(size: int) -> int:
    return -(-size // UNIT)


class Waiter:
    """Waits for requests in one thread of this rank. All ranks create their objects in the same order.

    A wait sleeps between polls, so that computing ranks have the cores. It raises the errors of the topology's stall
    detector: RankLostError, RankLeftError, CollectiveTimeoutError. clock: runs during a wait.
    """

    def __init__(self, topology: Topology, clock: Stopwatch) -> None:
        self._detector, self._record = topology.detector, topology.wait_record()
        self._record.raises = True
        self._clock = clock

    def until(self, done: Callable[[], bool], text: str) -> None:
        """Poll `done` until it returns True. text: names the wait in stall reports."""
        self._clock.start()
        try:
            with self._detector.translating_failures():
                if not done():
                    self._wait(done, text)
        finally:
            self._clock.stop()

    def _wait(self, done: Callable[[], bool], text: str) -> None:
        self._record.begin(NamedCall(text))
        try:
            wait_until(done, meanwhile=checking(self._detector, self._record))
        finally:
            self._record.end()

    def all_of(self, requests: Sequence[MPI.Request], text: str) -> None:
        """Return when all requests are complete."""
        try:
            self.until(lambda: all_done(requests), text)
        except BaseException:
            free_later(list(requests))  # and the memory that these may still use
            raise

    def forget(self) -> None:
        """Remove the wait record from the stall detector. Local."""
        self._detector.forget(self._record)


class Arrival(NamedTuple):
    """A received message; its memory is valid until `Mailbox.clear`."""

    worker: int
    tag: int
    message: Message


class Mailbox:
    """The server's side: receives requests and gradients from workers, and sends replies. The constructor is local.

    comm: the communicator of servers and workers. workers: the workers' ranks in it; a worker's number is its index
        here.
    measures, length, dtype: see Message.
    """

    def __init__(
        self, comm: MPI.Intracomm, waiter: Waiter, workers: Sequence[int], measures: int, length: int,
        dtype: np.dtype,
    ) -> None:  # fmt: skip
        self._comm, self._waiter, self._workers = comm, waiter, list(workers)
        self._shape = measures, length, dtype
        self._slots = [
            Arrival(number, tag, Message(measures, length if tag == PUSH else 0, dtype))
            for number in range(len(workers))
            for tag in (ASK, PUSH)
        ]
        self._receives: dict[Arrival, MPI.Request] = {}  # the posted ones
        self._arrived: deque[Arrival] = deque()
        self._sends: dict[Message, list[MPI.Request]] = {}  # of each reply buffer; reused when they are complete

    def open(self) -> None:
        """Post the receives of an epoch."""
        for slot in self._slots:
            if slot not in self._receives:
                self.clear(slot)

    def clear(self, arrival: Arrival) -> None:
        """Release the memory of `arrival`, and post the receive of the worker's next message."""
        buffer, worker = arrival.message.mpi_buffer(), self._workers[arrival.worker]
        self._receives[arrival] = self._comm.Irecv(buffer, worker, arrival.tag)

    def next(self, text: str) -> Arrival:
        """Return the next received message, waiting if there is none. text: names the wait."""
        if not self._arrived:
            self._waiter.until(self._poll, text)
        return self._arrived.popleft()

    def _poll(self) -> bool:
        received = [arrival for arrival, request in self._receives.items() if request.Test()]
        for arrival in received:
            del self._receives[arrival]
        self._arrived.extend(received)
        return bool(received)

    def message(self) -> Message:
        """Return a reply buffer whose sends are complete, or a new one."""
        for message, sends in self._sends.items():
            if all_done(sends):
                sends.clear()
                return message
        message = Message(*self._shape)
        self._sends[message] = []
        return message

    def reply(self, message: Message, worker: int) -> None:
        """Start sending `message` to a worker. Do not change it until `message()` returns it again. It may be sent to
        several workers."""
        self._sends[message].append(self._comm.Isend(message.mpi_buffer(), self._workers[worker], REPLY))

    def drain(self) -> None:
        """Wait until all replies are sent."""
        for sends in self._sends.values():
            self._waiter.all_of(sends, "send the last replies")
            sends.clear()

    def close(self) -> None:
        """Cancel the posted receives, which other ranks may not have matched. Local."""
        for request in self._receives.values():
            request.Cancel()
            request.Wait()
        self._receives, self._slots, self._sends = {}, [], {}

    def abandon(self) -> None:
        """Drop the requests without communication; the posted ones and their memory are freed later. Local."""
        free_later(self)


class Client:
    """The worker's side: requests work and parameters from servers, and pushes gradients. The constructor is local.

    comm: the communicator of servers and workers. servers: the servers' ranks in it. parts: the slice of the flat
        buffers that each server holds. measures, dtype: see Message.
    waiter: for the thread that pushes. waiter_ahead: for the thread that asks, which may be another one.
    """

    def __init__(
        self, comm: MPI.Intracomm, waiter: Waiter, waiter_ahead: Waiter, servers: Sequence[int], parts: Sequence[slice],
        measures: int, dtype: np.dtype,
    ) -> None:  # fmt: skip
        self._comm, self._waiter, self._waiter_ahead = comm, waiter, waiter_ahead
        self._servers, self._parts = list(servers), list(parts)
        lengths = [part.stop - part.start for part in parts]
        self._questions = [Message(measures, 0, dtype) for _ in servers]
        self._pushes = [Message(measures, length, dtype) for length in lengths]
        self.replies = [Message(measures, length, dtype) for length in lengths]
        self._sends: list[MPI.Request] = []  # of the last push

    def begin(self) -> None:
        """Reset the replies at the beginning of an epoch. Local."""
        for reply in self.replies:
            reply.header = Header()

    # Asking

    def fetch(self, halt: int) -> None:
        """Ask the first server for a part; if it deals one, ask the other servers for their parameters. Fills
        `replies`.

        halt: nonzero asks to end the epoch.
        """
        halt = halt or any(reply.header.halt for reply in self.replies)
        question = Header(halt=halt)
        self._ask([0], question)
        dealt = self.replies[0].header
        if dealt.kind == WORK:
            self._ask(range(1, len(self._servers)), question._replace(taken=dealt.taken))

    def _ask(self, servers: Sequence[int], question: Header) -> None:
        requests: list[MPI.Request] = []
        for server in servers:
            asked, rank = self._questions[server], self._servers[server]
            asked.header = question
            requests.append(self._comm.Irecv(self.replies[server].mpi_buffer(), rank, REPLY))
            requests.append(self._comm.Isend(asked.mpi_buffer(), rank, ASK))
        self._waiter_ahead.all_of(requests, "receive parameters from the servers")

    def copy_parameters(self, parameters: np.ndarray) -> list[int]:
        """Copy the received slices into `parameters`. Returns each server's version."""
        for part, reply in zip(self._parts, self.replies, strict=True):
            parameters[part] = reply.body
        return [reply.header.version for reply in self.replies]

    # Pushing

    def push(self, headers: Sequence[Header], gradients: np.ndarray | None, measures: Any = ()) -> None:
        """Send each server its slice of `gradients`, or a push without gradients if None. Returns once the previous
        push is complete and this one is started."""
        self._finish_push("send gradients to the servers")
        for index, (part, message) in enumerate(zip(self._parts, self._pushes, strict=True)):
            message.header = headers[index]
            message.measures[: len(measures)] = measures
            if gradients is not None:
                message.body[:] = gradients[part]
            buffer = message.mpi_buffer(with_body=gradients is not None)
            self._sends.append(self._comm.Isend(buffer, self._servers[index], PUSH))

    def _finish_push(self, text: str) -> None:
        sends, self._sends = self._sends, []
        self._waiter.all_of(sends, text)

    def bye(self) -> None:
        """Tell all servers that this worker has finished the epoch, and wait until that is sent."""
        self.push([Header(BYE)] * len(self._parts), None)
        self._finish_push("tell the servers that this worker has finished")

    def close(self) -> None:
        """Free the requests of the last push. Local."""
        for request in self._sends:
            request.Free()

    def abandon(self) -> None:
        """Drop the requests without communication; the posted ones and their memory are freed later. Local."""
        free_later(self)
