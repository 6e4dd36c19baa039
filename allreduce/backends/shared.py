"""Shared: the ranks of a node reduce straight in each other's memory.

Each rank finishes its own chunk from all ranks' buffers, in blocks that fit its cache, and writes the result to all of
them. Steps: 2 barriers. Messages: none. Memory traffic: 2 n S a node. Arrays from `allocate` lie in a file in memory
that all ranks map. Other arrays are reached by CMA (transport/cma.py), at the cost of one more copy in the cache; where
the system forbids CMA they go through a small staging buffer (transport/shared_segment.py), at the cost of two.
T. Hoefler et al.: MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared memory, 2013.
"""

import itertools
import weakref
import zlib
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from allreduce import notices
from allreduce.arrays import dtypes, float16
from allreduce.arrays.chunks import segments
from allreduce.arrays.memory_kinds import ALLOCATED, FOREIGN
from allreduce.arrays.ops import Op
from allreduce.backend import TwoPhase
from allreduce.engine.engine import Place
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import agree
from allreduce.transport.shared_segment import LEAST_BYTES, SharedSegment, StagedArray, StagingBuffer, wanted_bytes

WORD = np.dtype(np.int64)
BLOCK_BYTES = 256 * 1024  # what a rank adds at a time, from each rank
REACHED_BYTES = 1024 * 1024  # the same for memory that is reached by calls, which take a while each,
FETCHED_BYTES = 4 * 1024 * 1024  # and in all what is fetched at a time
STAGES = '"shared" stages arrays that are not from its allocate(): two more copies'


class Shared(TwoPhase):
    """Ranks of one node only. `allocate` gives memory that all of them reach.

    staged: True: other arrays go through the stage, also where ranks can reach each other's memory.
    """

    def __init__(self, topology: Topology, *, staged: bool = False, check: str = "first") -> None:
        if topology.nodes > 1:
            raise UnavailableError(
                f'"shared" needs all ranks on one node, and this is {topology}; '
                'use "hierarchical_copy", which uses "shared" inside each node'
            )
        self._staged_only = staged
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._reach = topology.cma
        self._reaches = self._reach.works and not self._staged_only
        self.copies_foreign = "" if self._reaches else STAGES
        self._arrays: dict[int, SharedSegment] = {}  # what `allocate` gave, by number; numbers are not used again
        self._memories: dict[int, weakref.ref[np.ndarray]] = {}  # theirs, of which NumPy's slices are views
        self._numbers = itertools.count()
        self._meetings = 0
        self._stage = StagingBuffer(self._comm, LEAST_BYTES)
        self._may_grow = True
        words = SharedSegment(self._comm, 4 * WORD.itemsize)
        assert words.ranks is not None
        # Of two calls, of all ranks: what it is, and where the memory is that others may reach.
        self._words, self._addresses = words.ranks.view(WORD).T.reshape(2, 2, self.size)
        self._fence = words.fence

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> np.ndarray:
        if device == "cuda":
            return super()._allocate(length, dtype, device)
        new = SharedSegment(self._comm, length * dtype.itemsize)
        self._arrays = {number: window for number, window in self._arrays.items() if window.alive()}
        self._arrays[next(self._numbers)] = new
        memory = new.give()
        owner = memory.base
        assert owner is not None
        self._memories = {number: memory for number, memory in self._memories.items() if memory() is not None}
        self._memories[id(owner)] = weakref.ref(owner)
        return memory.view(dtype)

    def _memory(self, buffer: np.ndarray) -> int:
        base = buffer.base
        memory = self._memories.get(id(base))
        if memory is not None and memory() is base and buffer.size:  # the usual case, at the cost of one look-up
            return ALLOCATED
        return FOREIGN if self._place(buffer) is None else ALLOCATED

    def _close(self) -> None:
        """Let go of the memory; an array that is still in use keeps its own."""
        self._arrays.clear()
        self._memories.clear()
        del self._stage, self._words, self._addresses, self._fence

    # Arrays from allocate(): no staging, every rank reaches into every rank's array

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        place = self._place(buffer)
        if place is None:
            if addresses := self._meet_outside(buffer, op.name):
                self._reduce_reached(buffer, op, addresses)
            else:
                self._reduce_staged(buffer, op)
            return
        everyone = self._meet(buffer, op.name, place)
        for block in _blocks(self.owned(buffer.size), buffer.itemsize):
            parts = [array[block] for array in everyone]
            self._combine(parts, parts[0], op)
            for part in parts[1:]:
                np.copyto(part, parts[0])
        self._fence()

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        self._reduce_scatter(buffer, op)  # _combine sums 16-bit floats in float32, so nothing is widened before

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        place, call = self._place(buffer), f"reduce_scatter {op.name}"
        if place is None:
            if addresses := self._meet_outside(buffer, call):
                self._reduce_scatter_reached(buffer, op, addresses)
            else:
                self._reduce_scatter_staged(buffer, op, call)
            return
        everyone = self._meet(buffer, call, place)
        for block in _blocks(self.owned(buffer.size), buffer.itemsize):
            self._combine([array[block] for array in everyone], buffer[block], op)
        self._fence()

    def _all_gather(self, buffer: np.ndarray) -> None:
        place = self._place(buffer)
        if place is None:
            if addresses := self._meet_outside(buffer, "all_gather"):
                self._all_gather_reached(buffer, addresses)
            else:
                self._all_gather_staged(buffer)
            return
        everyone = self._meet(buffer, "all_gather", place)
        for rank, array in enumerate(everyone):
            if rank != self.rank:
                span = self.owned(buffer.size, rank)
                np.copyto(buffer[span], array[span])
        self._fence()

    # Other arrays: every rank reaches into every rank's memory, by calls

    def _meet_outside(self, buffer: np.ndarray, call: str) -> list[int]:
        """Where all ranks have their buffers, when all have come; nothing when some can't be reached."""
        if not self._reaches:
            return []
        meeting = (self._meetings + 1) % 2
        self._addresses[meeting, self.rank] = self._reach.address(buffer)
        self._meet(buffer, call, None)
        addresses = self._addresses[meeting].tolist()
        if all(addresses):
            return addresses
        notices.once(self.rank, STAGES)
        return []

    def _reduce_reached(self, buffer: np.ndarray, op: Op, addresses: list[int]) -> None:
        for block in self._reached_blocks(buffer):
            mine = self._combine_reached(buffer, block, op, addresses)
            for rank in self._others():
                self._reach.write(rank, addresses[rank] + block.start * buffer.itemsize, mine)
        self._fence()

    def _reduce_scatter_reached(self, buffer: np.ndarray, op: Op, addresses: list[int]) -> None:
        for block in self._reached_blocks(buffer):
            self._combine_reached(buffer, block, op, addresses)
        self._fence()

    def _all_gather_reached(self, buffer: np.ndarray, addresses: list[int]) -> None:
        for rank in self._others():
            span = self.owned(buffer.size, rank)
            if span.start < span.stop:
                self._reach.read(rank, addresses[rank] + span.start * buffer.itemsize, buffer[span])
        self._fence()

    def _combine_reached(self, buffer: np.ndarray, block: slice, op: Op, addresses: list[int]) -> np.ndarray:
        """This rank's block of `buffer`, combined from all ranks'."""
        mine = buffer[block]
        fetched = self._room_for_others(mine)
        parts = [*fetched[: self.rank], mine, *fetched[self.rank :]]
        for rank in self._others():
            self._reach.read(rank, addresses[rank] + block.start * buffer.itemsize, parts[rank])
        self._combine(parts, mine, op)
        return mine

    def _room_for_others(self, mine: np.ndarray) -> np.ndarray:
        """A row for every other rank's part, which begins where `mine` does in a word: float16.combine needs it."""
        shift = MPI.Get_address(mine) % float16.WORD.itemsize // mine.itemsize
        length = shift + mine.size + (shift + mine.size) % 2
        rows = self.workspace.array("fetched", length * (self.size - 1), mine.dtype).reshape(-1, length)
        return rows[:, shift : shift + mine.size]

    def _reached_blocks(self, buffer: np.ndarray) -> Iterator[slice]:
        nbytes = min(REACHED_BYTES, FETCHED_BYTES // (self.size - 1))
        return segments(self.owned(buffer.size), max(nbytes // buffer.itemsize, 1))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # Other arrays that can't be reached: by way of the stage, one fence a turn

    def _reduce_staged(self, buffer: np.ndarray, op: Op) -> None:
        staged = self._staged(buffer, op.name)
        staged.put_others(0)
        self._meet(buffer, op.name, None)
        for turn in range(staged.turns):
            self._combine(staged.contributions(turn), staged.own(turn), op)
            staged.put_own(turn)
            staged.put_others(turn + 1)
            self._fence()
            staged.get_others(turn)
        staged.end()

    def _reduce_scatter_staged(self, buffer: np.ndarray, op: Op, call: str) -> None:
        staged = self._staged(buffer, call)
        staged.put_others(0)
        self._meet(buffer, call, None)
        for turn in range(staged.turns):
            if turn:
                self._fence()
            self._combine(staged.contributions(turn), staged.own(turn), op)
            staged.put_others(turn + 1)
        staged.end()

    def _all_gather_staged(self, buffer: np.ndarray) -> None:
        if buffer.itemsize > self._stage.slot_bytes:  # a structure
            self._hand_round([buffer[self.owned(buffer.size, rank)] for rank in range(self.size)])
            return
        staged = self._staged(buffer, "all_gather")
        staged.put_own(0)
        self._meet(buffer, "all_gather", None)
        for turn in range(staged.turns):
            if turn:
                self._fence()
            staged.get_others(turn)
            staged.put_own(turn + 1)
        staged.end()

    def _staged(self, buffer: np.ndarray, call: str) -> StagedArray:
        """`buffer` before its first turn. The stage grows with the arrays that come."""
        wanted = wanted_bytes(buffer.nbytes, self.size)
        if wanted > self._stage.nbytes and self._may_grow:
            self._meet(buffer, call, None)  # so all ranks make it
            try:
                self._stage = StagingBuffer(self._comm, wanted)
            except UnavailableError:  # on all ranks; the one that is there does it more slowly
                self._may_grow = False
        return StagedArray(self._stage, buffer)

    # Both

    def _meet(self, buffer: np.ndarray, call: str, place: Place | None) -> list[np.ndarray]:
        """Wait for all ranks, see that they came with the same thing, and return everyone's array of it.

        place: from `_place`; None, for which nothing is returned, stands for ordinary arrays. Comparing a word
        in shared memory costs next to nothing, so here ranks that disagree are found in every call.
        """
        code = dtypes.code(buffer.dtype)
        word = zlib.crc32(f"{place} {buffer.size} {code} {call}".encode())
        self._meetings += 1
        words = self._words[self._meetings % 2]  # a rank that is ahead is in the next call at the most
        words[self.rank] = word
        self._fence()
        if words.tolist().count(word) < self.size:
            self._tell_difference(buffer, call, place)
        if place is None:
            return []
        index, offset = place
        memory = self._arrays[index].ranks
        assert memory is not None  # this rank's array lies in it
        return list(memory[:, offset : offset + buffer.nbytes].view(buffer.dtype))

    def _tell_difference(self, buffer: np.ndarray, call: str, place: Place | None) -> None:
        where = f"array {place[0]} from allocate() at byte {place[1]}" if place else "ordinary memory"
        row = f"{call}: length {buffer.size}, dtype {buffer.dtype}, {where}"
        agree(self._comm, [zlib.crc32(row.encode())], row, None)

    def _place(self, buffer: np.ndarray) -> Place | None:
        address = MPI.Get_address(buffer)
        for number, window in self._arrays.items():
            if window.address <= address < window.end and buffer.size and window.alive():
                return number, address - window.address
        return None

    def _combine(self, parts: list[np.ndarray], out: np.ndarray, op: Op) -> None:
        """Combine the ranks' parts in rank order and finish them in `out`, which may be one of them."""
        if out.dtype != dtypes.FLOAT16:
            self._combine_in_accumulator(parts, out, op)
            return
        done = float16.combine(parts, out, op, self.workspace)
        for rest in (slice(0, done.start), slice(done.stop, out.size)):
            if rest.start < rest.stop:
                self._combine_in_accumulator([part[rest] for part in parts], out[rest], op)

    def _combine_in_accumulator(self, parts: list[np.ndarray], out: np.ndarray, op: Op) -> None:
        accumulator = dtypes.TYPES[out.dtype].accumulator
        in_place = accumulator == out.dtype and (out is parts[0] or len(parts) == 2)
        total = out if in_place else self.workspace.array("total", out.size, accumulator)
        if accumulator == out.dtype:
            op.combine(parts[0], parts[1], out=total)
        else:
            np.copyto(total, parts[0])
            op.combine(total, parts[1], out=total)
        for part in parts[2:]:
            op.combine(total, part, out=total)
        op.finish(total)
        if not in_place:
            np.copyto(out, total, casting="unsafe")  # rounds 16-bit floats, once


def _blocks(span: slice, itemsize: int) -> Iterator[slice]:
    # Casting 16-bit floats costs more than a miss of the cache, so there the fewer calls the better.
    return segments(span, 2 * BLOCK_BYTES // itemsize if itemsize == 2 else BLOCK_BYTES // itemsize)
