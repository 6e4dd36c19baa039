"""What travels between workers and servers: a head of whole numbers, a few measures, and a piece of a flat buffer.

A parcel is one message in memory that is used again and again, so nothing is allocated, packed or pickled on the way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.topology import Topology
from allreduce.transport.wait import NamedCall, all_done, looking, wait_until
from trainers.stopwatch import Stopwatch

ASK, PUSH, REPLY, MEET = 1, 2, 3, 4  # tags
UNIT = 64  # bytes: messages are counted in them, so that no count passes a C int


class Head(NamedTuple):
    """The first numbers of a parcel.

    kind: what it is for; which, depends on the tag: one of those below.
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
    unit: the datatype of UNIT bytes.
    """

    def __init__(self, measures: int, length: int, dtype: np.dtype, unit: MPI.Datatype) -> None:
        heads = len(Head._fields)
        self._front = _units(8 * (heads + measures))
        self._memory = np.zeros(UNIT * (self._front + _units(length * dtype.itemsize)), np.uint8)
        self._head = self._memory[: 8 * heads].view(np.int64)
        self.measures = self._memory[8 * heads : 8 * (heads + measures)].view(np.float64)
        start = UNIT * self._front
        self.body = self._memory[start : start + length * dtype.itemsize].view(dtype)
        self._unit = unit

    @property
    def head(self) -> Head:
        return Head(*self._head.tolist())

    @head.setter
    def head(self, head: Head) -> None:
        self._head[:] = head

    def message(self, whole: bool = True) -> tuple[np.ndarray, int, MPI.Datatype]:
        """As MPI takes it; not whole: without the body. Whoever receives posts it whole."""
        return self._memory, self._memory.size // UNIT if whole else self._front, self._unit


def unit_type() -> MPI.Datatype:
    """UNIT bytes as a datatype, which its user frees."""
    return MPI.BYTE.Create_contiguous(UNIT).Commit()


def _units(size: int) -> int:
    return -(-size // UNIT)


class Waits:
    """The waits of one thread of this rank. All ranks make theirs in the same order.

    They sleep between looks, so that ranks that compute have the cores, and raise what the topology's watch finds:
    RankLostError, RankLeftError, CollectiveTimeoutError. clock: runs meanwhile.
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
        self.until(lambda: all_done(requests), text)

    def forget(self) -> None:
        """There are no more waits. Local."""
        self._detector.forget(self._record)
