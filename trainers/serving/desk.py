"""A server's desk: what workers send lands on it without being asked for, and parcels leave from it.

Every worker has a place of its own for each kind of message, whose receive is posted ahead, so a server takes
whatever has come, in any order, and all of what has come before it looks again: no worker can starve another.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.transport.deferred_free import keep
from allreduce.transport.wait import all_done
from trainers.serving.parcels import ASK, PUSH, REPLY, Head, Parcel
from trainers.serving.waits import Waits


class Arrival(NamedTuple):
    """A message that lies on the desk until its place is cleared."""

    worker: int
    tag: int
    parcel: Parcel


class Desk:
    """Local to make.

    comm: of servers and workers. workers: their ranks there; a worker's number is its place in this list.
    measures, length, dtype, unit: of parcels, see there.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, workers: Sequence[int], measures: int, length: int,
        dtype: np.dtype, unit: MPI.Datatype,
    ) -> None:  # fmt: skip
        self._comm, self._waits, self._workers = comm, waits, list(workers)
        self._shape = measures, length, dtype, unit
        self._places: list[Arrival] = []
        self._requests: list[MPI.Prequest] = []
        for number, rank in enumerate(workers):
            for tag in (ASK, PUSH):
                parcel = Parcel(measures, length if tag == PUSH else 0, dtype, unit)
                self._places.append(Arrival(number, tag, parcel))
                self._requests.append(comm.Recv_init(parcel.message(), rank, tag))
        self._posted = [False] * len(self._places)
        self._arrived: deque[int] = deque()
        self._leaving: list[tuple[Parcel, list[MPI.Request]]] = []  # parcels, used again when they have left

    def open(self, tags: Sequence[int]) -> None:
        """Post the receives of an epoch."""
        for index, place in enumerate(self._places):
            if place.tag in tags and not self._posted[index]:
                self._post(index)

    def clear(self, arrival: Arrival) -> None:
        """The message was dealt with: the worker's next one may come."""
        self._post(self._places.index(arrival))

    def _post(self, index: int) -> None:
        self._requests[index].Start()
        self._posted[index] = True

    def next(self, text: str) -> Arrival:
        """A message that has come; waits for one when there is none. text: what for."""
        if not self._arrived:
            self._waits.until(self._look, text)
        return self._places[self._arrived.popleft()]

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
        self._requests, self._places, self._leaving = [], [], []

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        keep(self)
