"""The messages between workers and servers: a parcel, the mailbox of a server, and the client of a worker."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.transport.wait import NamedCall, all_done, looking, wait_until
from trainers.stopwatch import Stopwatch

ASK, PUSH, REPLY = 1, 2, 3  # tags
UNIT = 64  # bytes: messages are counted in them, so that no count passes a C int


class Head(NamedTuple):
    """The first numbers of a parcel.

    kind: the purpose of the parcel: one of the constants below that belong to its tag.
    step: the step, or the number of the dealt part of a batch.
    version: how many updates the parameters have had that it holds, or that the gradients were computed with.
    halt: not zero when the sender wants the epoch to end: an error, or a stop that was asked for.
    taken: how many pushes the first server had taken in this epoch when it dealt; others answer when they have as many.
    """

    kind: int = 0
    step: int = 0
    version: int = 0
    halt: int = 0
    taken: int = 0


def check(head: Head, tag: int, parts: int, version: int) -> None:
    """Raise CommunicationError when no worker can have sent this in an epoch.

    parts: how many there are to deal. version: how many updates the parameters have had that it may have seen.
    """
    right = 0 <= head.taken <= parts
    if tag == PUSH and head.kind != BYE:
        right = head.kind in (GRADIENTS, NOTHING) and 0 <= head.step < parts and 0 <= head.version <= version
    if not right:
        raise CommunicationError(f"a worker has sent {head} in an epoch of {parts} parts, after {version} updates")


GRADIENTS, NOTHING, BYE = range(3)  # of a push: with gradients, without any, and the last one of an epoch
WORK, END, AGAIN = range(3)  # of a reply: with parameters; there is nothing to do any more; nothing yet, ask again


class Parcel:
    """One message's memory.

    measures: how many numbers (float64) travel behind the head. length, dtype: of `body`, the 1-D array behind them.
    """

    def __init__(self, measures: int, length: int, dtype: np.dtype) -> None:
        heads = len(Head._fields)
        self._front = _units(8 * (heads + measures))
        self._memory = np.zeros(UNIT * (self._front + _units(length * dtype.itemsize)), np.uint8)
        self._head = self._memory[: 8 * heads].view(np.int64)
        self.measures = self._memory[8 * heads : 8 * (heads + measures)].view(np.float64)
        start = UNIT * self._front
        self.body = self._memory[start : start + length * dtype.itemsize].view(dtype)

    @property
    def head(self) -> Head:
        return Head(*self._head.tolist())

    @head.setter
    def head(self, head: Head) -> None:
        self._head[:] = head

    def message(self, whole: bool = True) -> tuple[np.ndarray, int, MPI.Datatype]:
        """As MPI takes it; not whole: without the body. Whoever receives posts it whole."""
        return self._memory, self._memory.size // UNIT if whole else self._front, unit_type()


@cache
def unit_type() -> MPI.Datatype:
    """UNIT bytes as a datatype, the same in all calls."""
    return MPI.BYTE.Create_contiguous(UNIT).Commit()


def _units(size: int) -> int:
    return -(-size // UNIT)


class Waits:
    """The waits of one thread of this rank. All ranks make theirs in the same order.

    They sleep between looks, so that ranks that compute have the cores, and raise what the topology's stall detector
    finds: RankLostError, RankLeftError, CollectiveTimeoutError. clock: runs meanwhile.
    """

    def __init__(self, topology: Topology, clock: Stopwatch) -> None:
        self._detector, self._record = topology.detector, topology.wait_record()
        self._record.raises = True
        self._clock = clock

    def until(self, done: Callable[[], bool], text: str) -> None:
        """Return when `done`, which is called again and again. text: what this rank waits for."""
        self._clock.start()
        try:
            with self._detector.hearing():
                if not done():
                    self._wait(done, text)
        finally:
            self._clock.stop()

    def _wait(self, done: Callable[[], bool], text: str) -> None:
        self._record.begin(NamedCall(text))
        try:
            wait_until(done, meanwhile=looking(self._detector, self._record))
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
        """There are no more waits. Local."""
        self._detector.forget(self._record)


class Arrival(NamedTuple):
    """A message that lies in the mailbox until its slot is cleared."""

    worker: int
    tag: int
    parcel: Parcel


class Mailbox:
    """A server's end of the messages: receives questions and gradients, and replies. Local to make.

    comm: of servers and workers. workers: their ranks there; a worker's number is its index there.
    measures, length, dtype: of parcels, see there.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, workers: Sequence[int], measures: int, length: int,
        dtype: np.dtype,
    ) -> None:  # fmt: skip
        self._comm, self._waits, self._workers = comm, waits, list(workers)
        self._shape = measures, length, dtype
        self._slots: list[Arrival] = []
        self._requests: list[MPI.Prequest] = []
        for number, rank in enumerate(workers):
            for tag in (ASK, PUSH):
                parcel = Parcel(measures, length if tag == PUSH else 0, dtype)
                self._slots.append(Arrival(number, tag, parcel))
                self._requests.append(comm.Recv_init(parcel.message(), rank, tag))
        self._posted = [False] * len(self._slots)
        self._arrived: deque[int] = deque()
        self._leaving: list[tuple[Parcel, list[MPI.Request]]] = []  # parcels, used again when they have left

    def open(self, tags: Sequence[int]) -> None:
        """Post the receives of an epoch."""
        for index, slot in enumerate(self._slots):
            if slot.tag in tags and not self._posted[index]:
                self._post(index)

    def clear(self, arrival: Arrival) -> None:
        """The message was dealt with: the worker's next one may come."""
        self._post(self._slots.index(arrival))

    def _post(self, index: int) -> None:
        self._requests[index].Start()
        self._posted[index] = True

    def next(self, text: str) -> Arrival:
        """A message that has come; waits for one when there is none. text: what for."""
        if not self._arrived:
            self._waits.until(self._look, text)
        return self._slots[self._arrived.popleft()]

    def _look(self) -> bool:
        come = [index for index, posted in enumerate(self._posted) if posted and self._requests[index].Test()]
        for index in come:
            self._posted[index] = False
        self._arrived.extend(come)
        return bool(come)

    def parcel(self) -> Parcel:
        """One that nobody has to receive any more, to be filled and sent."""
        for parcel, sends in self._leaving:
            if all_done(sends):
                sends.clear()
                return parcel
        parcel = Parcel(*self._shape)
        self._leaving.append((parcel, []))
        return parcel

    def reply(self, parcel: Parcel, worker: int, whole: bool) -> None:
        """Send a parcel, which must be left as it is until `parcel` gives it again; one may go to several workers."""
        sends = next(sends for each, sends in self._leaving if each is parcel)
        sends.append(self._comm.Isend(parcel.message(whole), self._workers[worker], REPLY))

    def answer(self, head: Head, worker: int) -> None:
        """A reply that is nothing but its head."""
        parcel = self.parcel()
        parcel.head = head
        self.reply(parcel, worker, whole=False)

    def drain(self) -> None:
        """Wait until everything has left."""
        for _, sends in self._leaving:
            self._waits.all_of(sends, "hand out the last replies")
            sends.clear()

    def close(self) -> None:
        """Give the receives back. Local."""
        for request, posted in zip(self._requests, self._posted, strict=True):
            if posted:
                request.Cancel()
                request.Wait()
            request.Free()
        self._requests, self._slots, self._leaving = [], [], []

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        free_later(self)


class Client:
    """A worker's end of the messages: asks servers for work and pushes gradients. Local to make.

    comm: of servers and workers. servers: their ranks there. parts: the slice of the flat buffers that each holds.
    waits: of the thread that pushes. waits_ahead: of the thread that asks, which may be another one.
    measures, dtype: of parcels, see there.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, waits_ahead: Waits, servers: Sequence[int], parts: Sequence[slice],
        measures: int, dtype: np.dtype,
    ) -> None:  # fmt: skip
        self._waits, self._waits_ahead = waits, waits_ahead
        self._parts = list(parts)
        lengths = [part.stop - part.start for part in parts]
        self._questions = [Parcel(measures, 0, dtype) for _ in servers]
        self._pushes = [Parcel(measures, length, dtype) for length in lengths]
        self.replies = [Parcel(measures, length, dtype) for length in lengths]
        pairs = list(zip(servers, range(len(servers)), strict=True))
        self._asks = [comm.Send_init(self._questions[index].message(), rank, ASK) for rank, index in pairs]
        self._whole = [comm.Send_init(self._pushes[index].message(), rank, PUSH) for rank, index in pairs]
        self._heads = [comm.Send_init(self._pushes[index].message(whole=False), rank, PUSH) for rank, index in pairs]
        self._receives = [comm.Recv_init(self.replies[index].message(), rank, REPLY) for rank, index in pairs]
        self._expected: list[bool] = [False] * len(pairs)

    def begin(self) -> None:
        """An epoch begins."""
        for reply in self.replies:
            reply.head = Head()

    # Asking

    def fetch(self, halt: int) -> None:
        """Ask the first server what to do, and, when there is work, all others for their parameters; into `replies`.

        halt: not zero to have the epoch ended.
        """
        halt = halt or any(reply.head.halt for reply in self.replies)
        question = Head(halt=halt)
        self._ask([0], question)
        while self.replies[0].head.kind == AGAIN:
            self._ask([0], question)
        dealt = self.replies[0].head
        if dealt.kind == WORK:
            self._ask(range(1, len(self._asks)), question._replace(taken=dealt.taken))

    def _ask(self, servers: Sequence[int], question: Head) -> None:
        for server in servers:
            self.expect(server)
            self._questions[server].head = question
            self._asks[server].Start()
        self._await(servers, self._waits_ahead)
        self._waits_ahead.all_of([self._asks[server] for server in servers], "have questions received")

    def expect(self, server: int) -> None:
        """Post the receive of a server's reply, before anything makes it answer."""
        self._receives[server].Start()
        self._expected[server] = True

    def _await(self, servers: Sequence[int], waits: Waits) -> None:
        waits.all_of([self._receives[server] for server in servers], "get parameters from the servers")
        for server in servers:
            self._expected[server] = False

    def answered(self) -> None:
        """Return when all servers have replied to what was pushed to them."""
        self._await(range(len(self._receives)), self._waits)

    def take(self, parameters: np.ndarray) -> list[int]:
        """Copy what has come to its places; returns the version that each server has given."""
        for part, reply in zip(self._parts, self.replies, strict=True):
            parameters[part] = reply.body
        return [reply.head.version for reply in self.replies]

    # Pushing

    def push(self, heads: Sequence[Head], gradients: np.ndarray | None, measures: Any = ()) -> None:
        """Send each server its slice of the gradients, or none; waits only until those before have been received."""
        self._waits.all_of(self._whole + self._heads, "have gradients received")
        for index, (part, parcel) in enumerate(zip(self._parts, self._pushes, strict=True)):
            parcel.head = heads[index]
            parcel.measures[: len(measures)] = measures
            if gradients is not None:
                parcel.body[:] = gradients[part]
            (self._heads if gradients is None else self._whole)[index].Start()

    def bye(self) -> None:
        """This worker has pushed all that it will push in this epoch; waits until that was received."""
        self.push([Head(BYE)] * len(self._parts), None)
        self._waits.all_of(self._heads, "take leave of the servers")

    def close(self) -> None:
        """Give the requests back. Local."""
        for request, expected in zip(self._receives, self._expected, strict=True):
            if expected:
                request.Cancel()
                request.Wait()
        for request in [*self._asks, *self._whole, *self._heads, *self._receives]:
            request.Free()

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        free_later(self)
