"""Shared: the ranks of a node reduce straight in the memory that they share (MPI-3 shared windows).

Each rank finishes its own chunk from all ranks' buffers, in blocks that fit its cache, and writes the
result to all of them. Steps: 2 barriers. Messages: none. Memory traffic: 2 n S a node for arrays from
`allocate`; other arrays are staged through a small window, at the cost of two more copies in the cache.
T. Hoefler et al.: MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared memory, 2013.
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
from mpi4py import MPI

from allreduce.arrays import dtypes, float16
from allreduce.arrays.chunks import chunk, segments
from allreduce.arrays.ops import Op
from allreduce.arrays.signature import ALLOCATED, FOREIGN
from allreduce.base import TwoPhase
from allreduce.errors import UnavailableError, agree
from allreduce.messages.window import Window, still_in_use
from allreduce.topology import Topology

BLOCK_BYTES = 256 * 1024  # what a rank adds at a time, from each rank
STAGE_BYTES = 1024 * 1024  # what a rank stages of a foreign array in one round
LEAST_PART_BYTES = 16 * 1024
CACHE_LINE = 64
# Arrays tend to begin at the start of a page. Copies between equal places in pages are slow on many
# processors (AMD's Zen 4: twice), so the staged parts begin in the middle of one.
STAGE_OFFSET = 2048


class Shared(TwoPhase):
    """Ranks of one node only. `allocate` gives memory in a shared window."""

    copies_foreign = '"shared" stages arrays that are not from its allocate(): two more copies'

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        if topology.nodes > 1:
            raise UnavailableError(
                f'"shared" needs all ranks on one node, and this is {topology}; '
                'use "hierarchical_copy", which uses "shared" inside each node'
            )
        super().__init__(topology, check=check)
        self._arrays: dict[int, Window] = {}  # what `allocate` gave, by number; numbers are not used again
        self._numbers = itertools.count()
        # Whole cache lines, so that no segment of any dtype is ever out of line.
        self._part_bytes = max(STAGE_BYTES // self.size, LEAST_PART_BYTES) // CACHE_LINE * CACHE_LINE
        try:
            self._stage = Window(self._comm, STAGE_OFFSET + 2 * self.size * self._part_bytes)
        except UnavailableError:  # on all ranks
            topology.release(self._comm, self)
            raise
        self._words = [memory[:8].view(np.int64) for memory in self._stage.ranks]

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> np.ndarray:
        if device == "cuda":
            return super()._allocate(length, dtype, device)
        self._free_unused()
        number = next(self._numbers)
        window = self._arrays[number] = Window(self._comm, length * dtype.itemsize)
        return window.give().view(dtype)

    def _free_unused(self) -> None:
        """Give back the arrays that no rank holds any more. Collective."""
        used = still_in_use(self._comm, list(self._arrays.values()))
        for number, in_use in zip(list(self._arrays), used, strict=True):
            if not in_use:
                self._arrays.pop(number).free()

    def _memory(self, buffer: np.ndarray) -> int:
        return FOREIGN if self._find(buffer) is None else ALLOCATED

    def _close(self) -> None:
        self._words = []
        for window in [self._stage, *self._arrays.values()]:
            window.free()

    # Arrays from allocate(): no staging, every rank reaches into every rank's array

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        place = self._meet(buffer, op.name)
        if place is None:
            self._reduce_staged(buffer, op)
            return
        window, everyone = place
        for block in _blocks(self.owned(buffer.size), buffer.itemsize):
            parts = [array[block] for array in everyone]
            self._combine(parts, parts[0], op)
            for part in parts[1:]:
                np.copyto(part, parts[0])
        window.fence()

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        self._reduce_scatter(buffer, op)  # _combine sums 16-bit floats in float32, so nothing is widened before

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        place = self._meet(buffer, f"reduce_scatter {op.name}")
        if place is None:
            self._reduce_scatter_staged(buffer, op)
            return
        window, everyone = place
        for block in _blocks(self.owned(buffer.size), buffer.itemsize):
            self._combine([array[block] for array in everyone], buffer[block], op)
        window.fence()

    def _all_gather(self, buffer: np.ndarray) -> None:
        place = self._meet(buffer, "all_gather")
        if place is None:
            self._all_gather_staged(buffer)
            return
        window, everyone = place
        for rank, array in enumerate(everyone):
            if rank != self.rank:
                span = chunk(buffer.size, self.size, rank)
                np.copyto(buffer[span], array[span])
        window.fence()

    # Foreign arrays: in each round every rank stages one segment of every chunk

    def _reduce_staged(self, buffer: np.ndarray, op: Op) -> None:
        for stage in self._rounds(buffer):
            stage.put_others()
            stage.fence()
            self._combine(stage.contributions(), stage.own, op)
            stage.put_own()
            stage.fence()
            stage.get_others()

    def _reduce_scatter_staged(self, buffer: np.ndarray, op: Op) -> None:
        for stage in self._rounds(buffer):
            stage.put_others()
            stage.fence()
            self._combine(stage.contributions(), stage.own, op)

    def _all_gather_staged(self, buffer: np.ndarray) -> None:
        for stage in self._rounds(buffer):
            stage.put_own()
            stage.fence()
            stage.get_others()

    def _rounds(self, buffer: np.ndarray) -> Iterator["_Round"]:
        step = self._part_bytes // buffer.itemsize
        cut = [list(segments(chunk(buffer.size, self.size, rank), step)) for rank in range(self.size)]
        for turn, spans in enumerate(zip_longest(*cut, fillvalue=slice(0, 0))):
            # Rounds alternate between two halves of the window: a rank that is ahead writes to the one
            # half while others still read the other, and a fence lies before it comes back to the first.
            start = STAGE_OFFSET + (turn % 2) * self.size * self._part_bytes
            yield _Round(self._stage, buffer, spans, self.rank, start, self._part_bytes)

    # Both

    def _meet(self, buffer: np.ndarray, call: str) -> tuple[Window, list[np.ndarray]] | None:
        """Wait for all ranks, see that they came with the same thing, and return everyone's array of it.

        None stands for foreign arrays. Comparing a word in shared memory costs next to nothing, so here
        ranks that disagree are found in every call.
        """
        index, offset = place = self._find(buffer) or (-1, -1)
        code = dtypes.TYPES[buffer.dtype].code
        word = zlib.crc32(f"{place} {buffer.size} {code} {call}".encode())
        self._words[self.rank][0] = word
        self._stage.fence()
        if any(other[0] != word for other in self._words):
            self._tell_disagreement(buffer, call, place)
        if index < 0:
            return None
        window = self._arrays[index]
        span = slice(offset, offset + buffer.nbytes)
        return window, [memory[span].view(buffer.dtype) for memory in window.ranks]

    def _tell_disagreement(self, buffer: np.ndarray, call: str, place: tuple[int, int]) -> None:
        index, offset = place
        where = f"array {index} from allocate() at byte {offset}" if index >= 0 else "ordinary memory"
        row = f"{call}: length {buffer.size}, dtype {buffer.dtype}, {where}"
        agree(self._comm, [zlib.crc32(row.encode())], row, None)

    def _find(self, buffer: np.ndarray) -> tuple[int, int] | None:
        """The number of the array from `allocate` that `buffer` lies in, and its place there in bytes."""
        address = MPI.Get_address(buffer)
        for number, window in self._arrays.items():
            if window.address <= address < window.end and buffer.size:
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


class _Round:
    """One round of staging: segment `spans[r]` of each rank r's chunk, and the places for them in the window."""

    def __init__(
        self, window: Window, buffer: np.ndarray, spans: Sequence[slice], rank: int, start: int, part_bytes: int
    ) -> None:
        self._window, self._buffer, self._spans, self._rank = window, buffer, spans, rank
        self._start, self._part_bytes = start, part_bytes
        self._others = [other for other in range(len(spans)) if other != rank]
        self.own = buffer[spans[rank]]
        self.fence = window.fence

    def put_others(self) -> None:
        """Lay out what the other ranks are to reduce."""
        for other in self._others:
            np.copyto(self._slot(self._rank, other), self._buffer[self._spans[other]])

    def contributions(self) -> list[np.ndarray]:
        """All ranks' segments of this rank's chunk; its own is where it always was."""
        ranks = range(len(self._spans))
        return [self.own if rank == self._rank else self._slot(rank, self._rank) for rank in ranks]

    def put_own(self) -> None:
        """Lay out what this rank has finished."""
        np.copyto(self._slot(self._rank, self._rank), self.own)

    def get_others(self) -> None:
        """Fetch what the other ranks have finished."""
        for other in self._others:
            np.copyto(self._buffer[self._spans[other]], self._slot(other, other))

    def _slot(self, rank: int, part: int) -> np.ndarray:
        """The place in `rank`'s memory for the segment of chunk `part`."""
        span = self._spans[part]
        begin = self._start + part * self._part_bytes
        end = begin + (span.stop - span.start) * self._buffer.itemsize
        return self._window.ranks[rank][begin:end].view(self._buffer.dtype)


def _blocks(span: slice, itemsize: int) -> Iterator[slice]:
    # Casting 16-bit floats costs more than a miss of the cache, so there the fewer calls the better.
    return segments(span, 2 * BLOCK_BYTES // itemsize if itemsize == 2 else BLOCK_BYTES // itemsize)
