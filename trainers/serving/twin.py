"""A server's twin: another server that is sent what this one has of its slice, and could take its place with it.

A state is one message: the slice of the parameters, what the optimizer keeps for it, what has no slices, and which
parts of the epoch have come into it. Two states of each side are kept, so that one is whole while another comes.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from allreduce.errors import CommunicationError
from allreduce.messages.kept import keep
from trainers.replica import Replica
from trainers.rescue import Arrays, Piece
from trainers.serving.parcels import KEEP, UNIT
from trainers.serving.parts import Parts
from trainers.serving.waits import Waits
from trainers.twins import KEEPS, NEVER

RATES, EPOCH, BOUNDS, OUTCOMES = (f"trainer.{name}" for name in ("learning_rates", "epoch", "bounds", "outcomes"))
Fill = Callable[[Arrays, Arrays], None]


class Numbers(NamedTuple):
    """The first numbers of a state.

    first: the steps after which it was so. marked: whether both sides wait until it has come.
    start, stop: of the slice. ranges, parts: of the epoch, see Parts.
    """

    first: int = NEVER
    marked: int = 0
    start: int = 0
    stop: int = 0
    ranges: int = 1
    parts: int = 0


class Layout:
    """Where the arrays of a state lie in one block of memory. parameters: the flat buffer that slices are cut from."""

    def __init__(self, replica: Replica, parameters: np.ndarray) -> None:
        held = replica.state()
        self._sliced = [("parameters", parameters.dtype, parameters.size)]
        self._sliced += [(name, held[name].dtype, held[name].size) for name in replica.elementwise]
        names = [name for name in held if name not in ("parameters", *replica.elementwise)]
        self._rest = [(name, held[name].dtype, held[name].shape) for name in names]
        self._rest += [(RATES, np.dtype(np.float64), (len(replica.learning_rates),))]
        self._rest += [(EPOCH, np.dtype(np.int64), (2,))]

    def size(self, numbers: Numbers) -> int:
        """Of a message, in bytes."""
        return UNIT + sum(_room(dtype, shape) for _, dtype, shape in self._arrays(numbers))

    def views(self, memory: np.ndarray, numbers: Numbers) -> tuple[Arrays, Arrays]:
        """What has slices, and the rest."""
        found, start = {}, UNIT
        for name, dtype, shape in self._arrays(numbers):
            stop = start + dtype.itemsize * math.prod(shape)
            found[name] = memory[start:stop].view(dtype).reshape(shape)
            start += _room(dtype, shape)
        sliced = {name: found.pop(name) for name, *_ in self._sliced}
        return sliced, found

    def _arrays(self, numbers: Numbers) -> Iterator[tuple[str, np.dtype, tuple[int, ...]]]:
        for name, dtype, size in self._sliced:
            start, stop, _ = slice(numbers.start, numbers.stop).indices(size)
            yield name, dtype, (max(0, stop - start),)
        yield from self._rest
        yield BOUNDS, np.dtype(np.int64), (numbers.ranges + 1,)
        yield OUTCOMES, np.dtype(np.int32), (numbers.ranges, numbers.parts)


def _room(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * math.prod(shape) // UNIT) * UNIT


class State:
    """One state, good for steps `first` to `last` (None: until the next update), in memory that is used again."""

    def __init__(self) -> None:
        self.first, self.last = NEVER, NEVER  # type: int, int | None
        self.memory = np.zeros(0, np.uint8)
        self.numbers = Numbers()

    def reserve(self, size: int) -> None:
        """It is overwritten. size: in bytes."""
        self.first = NEVER
        if self.memory.size != size:
            self.memory = np.zeros(size, np.uint8)

    def read(self, layout: Layout) -> None:
        """It has come. Raises CommunicationError when no server can have sent it."""
        heads = len(Numbers._fields)
        self.numbers = Numbers(*self.memory[: 8 * heads].view(np.int64).tolist())
        if min(self.numbers) < 0 or layout.size(self.numbers) != self.memory.size:
            raise CommunicationError(f"a server has sent a state of {self.memory.size} bytes with {self.numbers}")
        self.first, self.last = self.numbers.first, None

    def write(self, layout: Layout, numbers: Numbers, fill: Fill) -> None:
        """`fill` is given its arrays."""
        self.reserve(layout.size(numbers))
        self.memory[: 8 * len(numbers)].view(np.int64)[:] = numbers
        fill(*layout.views(self.memory, numbers))
        self.numbers, self.first, self.last = numbers, numbers.first, None

    def piece(self, layout: Layout, newest: int) -> Piece:
        """newest: the step that it is good for when nothing was updated since."""
        last = newest if self.last is None else self.last
        return Piece(self.first, last, self.numbers.start, self.numbers.stop, *layout.views(self.memory, self.numbers))


class Twin:
    """One server's side. Local to make.

    comm: of the servers, who wait with `waits`. keeper: has this one's states. ward: whose states this one has.
    unit: of UNIT bytes.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: Waits, unit: MPI.Datatype, keeper: int, ward: int, layout: Layout
    ) -> None:
        self._comm, self._waits, self._unit = comm, waits, unit
        self._keeper, self._ward, self._layout = keeper, ward, layout
        self._own, self._theirs = [State(), State()], [State(), State()]  # the newest first
        self._leaving: MPI.Request | None = None
        self._coming: MPI.Request | None = None
        self._owed = 0  # marked states that the ward has not sent yet, of as many as were sent from here

    def send(self, numbers: Numbers, fill: Fill) -> None:
        """Send the keeper what `fill` writes down, when the state before has left."""
        self._waits.until(self._looked, KEEPS)
        self._own.reverse()
        now = self._own[0]
        now.write(self._layout, numbers, fill)
        self._leaving = self._comm.Isend((now.memory, now.memory.size // UNIT, self._unit), self._keeper, KEEP)
        self._owed += numbers.marked

    def is_free(self) -> bool:
        """Take what has come; whether the state before has left. Never waits."""
        self._look()
        return self._leaving is None or bool(self._leaving.Test())

    def meet(self) -> None:
        """Return when all marked states have come, and left."""
        self._waits.until(lambda: self._looked() and self._owed <= 0, KEEPS)

    def _looked(self) -> bool:
        return self.is_free()

    def _look(self) -> None:
        if self._coming is None:
            status = MPI.Status()
            message = self._comm.Improbe(self._ward, KEEP, status)
            if message is None:
                return
            older, units = self._theirs[1], status.Get_count(self._unit)
            older.reserve(units * UNIT)
            self._coming = message.Irecv((older.memory, units, self._unit))
        if self._coming.Test():
            self._coming = None
            self._theirs.reverse()
            self._theirs[0].read(self._layout)
            self._owed -= self._theirs[0].numbers.marked

    def begin_update(self, steps: int) -> None:
        """So many steps were taken, and all servers have what the others had after them. Local."""
        for state in (*self._own, *self._theirs):
            state.last = steps if state.last is None else state.last

    def settle(self) -> None:
        """What is sent next is another state of the same step. Local."""
        for state in (*self._own, *self._theirs):
            state.last = state.first if state.last is None else state.last

    def pieces(self, newest: int) -> list[Piece]:
        """What there is, the newest first. newest: the step that this server has come to. Local."""
        states = [state for state in (*self._own, *self._theirs) if state.first != NEVER]
        return [state.piece(self._layout, newest) for state in states]

    def abandon(self) -> None:
        """Let go, without anybody else: what was posted stays for a while, with its memory."""
        keep(self)


def told(parts: Parts) -> Arrays:
    """An epoch, as a state has it."""
    return {EPOCH: np.array([parts.fit, parts.epoch]), BOUNDS: parts.bounds, OUTCOMES: parts.outcomes}


def heard(rest: Arrays) -> Parts:
    """An epoch that was told."""
    parts = Parts(int(rest[EPOCH][0]))
    parts.epoch, parts.bounds, parts.outcomes = int(rest[EPOCH][1]), rest[BOUNDS], rest[OUTCOMES]
    return parts
