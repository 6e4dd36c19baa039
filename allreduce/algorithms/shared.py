"""Shared: the ranks of a node reduce directly in each other's memory.

Each rank finishes its own chunk from all ranks' buffers, in blocks that fit its cache, and writes the result to all of
them. Steps: 2 barriers. Messages: none. Memory traffic: 2 n S a node. Arrays from `allocate` are in shared memory that
all ranks map. Other arrays are read and written by CMA (transport/cma.py), at the cost of one more copy in the cache.
If the system forbids CMA, they are copied, piece by piece, to a small staging buffer and back. T. Hoefler et al.: MPI +
MPI: a new hybrid approach to parallel programming with MPI plus shared memory, 2013.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from allreduce import kernels, notices
from allreduce.algorithm import Context, TwoPhase, Work
from allreduce.arrays import casts, dtypes, ops
from allreduce.arrays.chunks import segments
from allreduce.arrays.memory_kinds import ALLOCATED, GPU
from allreduce.arrays.ops import Op
from allreduce.call.call import Call
from allreduce.call.executor import do_nothing
from allreduce.call.rendezvous import CWork, double_word
from allreduce.errors import UnavailableError
from allreduce.transport import chunked, cost
from allreduce.transport.cost import Layout, Machine
from allreduce.transport.shared_segment import STAGING_BYTES, shared_rows

BLOCK_BYTES = 256 * 1024  # bytes that a rank adds at a time, from each rank
CAST_LENGTH = 64 * 1024  # elements that NumPy casts and adds at a time, so that they stay in the cache
CMA_BYTES = 1024 * 1024  # bytes of one CMA call: more than BLOCK_BYTES, because a call takes longer
FETCHED_BYTES = 4 * 1024 * 1024  # bytes that a rank reads by CMA at a time, from all ranks together
LEAST_STAGING_BYTES = 512 * 1024  # of all ranks; a staging buffer grows from this to STAGING_BYTES
# The longest array that is staged where CMA works, and the bytes of all ranks: while the staging buffer stays in the
# caches, CMA's system calls, which look up each page, take longer than the copies.
CACHED_BYTES, ALL_CACHED_BYTES = 2 * 1024 * 1024, 8 * 1024 * 1024
# Short arrays, which C sums when the ranks have met: the longest one from `allocate` that is summed in place, and the
# bytes of all ranks' copies. The longest arrays that are copied, from `allocate` and others, where each rank has a
# core, and where ranks outnumber cores. A copy spares a fence, but is written where another rank has read last, which
# takes five times as long if their cores share no cache.
IN_PLACE_BYTES, STAGED_BYTES = 1024 * 1024, 2 * 1024 * 1024
COPIED_BYTES, CROWDED_BYTES = (4 * 1024, 16 * 1024), (16 * 1024, STAGED_BYTES)
BY_C, IN_CACHE = 5e-7, 1 / 3  # seconds of such a call; a byte in the caches takes this part of the time
# Arrays tend to begin at the start of a page. Copies between equal offsets in pages are slow on many processors (AMD's
# Zen 4: twice as slow), so a staging buffer begins in the middle of a page.
OFFSET, CACHE_LINE = 2048, 64
STAGES = '"shared" stages arrays that are not from its allocate(): two more copies'


class Shared(TwoPhase):
    """For the ranks of one node. `allocate` returns memory that all of them map."""

    one_node = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if context.layout.nodes > 1:
            raise UnavailableError(
                f'"shared" needs all ranks on one node, and this is {context.topology}; '
                'use "hierarchical_copy", which uses "shared" inside each node'
            )
        self._staging = self._make_staging(LEAST_STAGING_BYTES)  # now, while shared memory is free
        if self.size > 1 and not context.executor.meets:
            raise UnavailableError("the ranks have no shared memory in which they can meet; use another backend")
        self._cma = context.cma
        self.copies_unregistered = "" if self._cma.works else STAGES
        self._meet, self._fence = context.executor.meet, context.executor.fence
        self._may_grow = True
        self._by_c = self.size > 1 and context.executor.orders and context.topology.by_c
        self._crowded = context.topology.sharing > context.topology.cores
        if self._by_c:
            try:
                self._copies = self._make_staging(2 * STAGED_BYTES)
                self._half, self._room = _divided(self.size, self._crowded)
            except UnavailableError:  # on all ranks: shared memory is almost full
                self._by_c = False

    @staticmethod
    def cost(nbytes: float, layout: Layout, machine: Machine) -> float:
        """2 fences; (n-1)/n S gamma: each rank adds S/n from n ranks and writes it to n (Hoefler et al. 2013). Arrays
        that are not from `allocate` are copied, too: up to 2 MiB there and back in the caches, with 3 fences (by C 2).
        Short arrays: 1 fence; each rank copies S and adds n S, by C."""
        at, k, share = layout, machine, (layout.ranks - 1) / layout.ranks
        if at.by_c and _is_copied(nbytes, at.allocated, at.ranks, at.per_core > 1):
            return BY_C + cost.fences(1, at, k) + IN_CACHE * nbytes * (k.copy + at.ranks * k.gamma) * at.per_core
        if not at.allocated and _stays_cached(nbytes, at.ranks):
            call, fences = (BY_C, 2) if at.by_c and nbytes <= _divided(at.ranks, at.per_core > 1)[1] else (k.call, 3)
            return call + cost.fences(fences, at, k) + IN_CACHE * share * nbytes * (2 * k.copy + k.gamma) * at.per_core
        call = BY_C if at.by_c and at.allocated and nbytes <= IN_PLACE_BYTES else k.call
        return call + cost.fences(2, at, k) + cost.adding(share * nbytes, at, k) + cost.fetching(nbytes, at, k)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> np.ndarray:
        if device == "cuda":
            return super().allocate(length, dtype, device)
        mine = shared_rows(self.comm, length * dtype.itemsize)[self.rank].view(dtype)
        if length:
            self.context.allocations.add(mine, keeps=False, ranks=self.size)
        return mine

    def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._staging = self._copies = np.empty((self.size, 0), np.uint8)

    # `work` is for a call in which the ranks have just met. An algorithm that contains this one calls `reduce` and the
    # phases, in which the ranks meet first.

    def work(self, call: Call, op: Op) -> Work:
        # in an all_gather, ranks without CMA send messages
        return self._work(call, op)._replace(waits_inside_mpi=call.kind == "all_gather")

    def _work(self, call: Call, op: Op) -> Work:
        if call.memory == GPU:
            return super().work(call, op)
        place = self.context.allocations.place
        nbytes = call.length * call.dtype.itemsize
        if self._by_c and call.kind == "all_reduce" and kernels.sums(call.dtype, op.adds):
            if _is_copied(nbytes, call.memory == ALLOCATED, self.size, self._crowded):
                compared = place if call.memory == ALLOCATED else None
                return Work(do_nothing, quiet=True, place=compared, in_c=lambda _: self._copied(call, op))
            if call.memory != ALLOCATED and nbytes <= self._room:
                return Work(partial(self._take_sums, call), quiet=True, in_c=lambda _: self._stages(call, op))
            if call.memory == ALLOCATED and nbytes <= IN_PLACE_BYTES:
                return Work(self.context.executor.fence, quiet=True, place=place, in_c=partial(self._placed, op=op))
        if call.memory == ALLOCATED:
            return Work(partial(self._in_place, call.kind, op=op), place=place)
        if call.kind == "all_reduce" and _stays_cached(nbytes, self.size):
            return Work(partial(self._reduce_staged, op=op), place=place)
        run = lambda buffer: self._elsewhere(call.kind, buffer, op, self.context.executor.addresses())  # noqa: E731
        return Work(run, address=self._address, place=place)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._enter("all_reduce", buffer, op)

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self._enter("reduce_scatter", buffer, op)

    scatter = reduce_scatter  # `_combine` sums 16-bit floats in float32

    def all_gather(self, buffer: np.ndarray) -> None:
        self._enter("all_gather", buffer, ops.OPS["sum"])

    def _enter(self, kind: str, buffer: np.ndarray, op: Op) -> None:
        if self.context.allocations.memory_of(buffer) == ALLOCATED:
            self._fence()
            self._in_place(kind, buffer, op)
        elif kind == "all_reduce" and _stays_cached(buffer.nbytes, self.size):
            self._reduce_staged(buffer, op)
        else:
            self._elsewhere(kind, buffer, op, self._meet(self._address(buffer)))

    def in_everyones_array(self, buffer: np.ndarray, run: Callable[[list[np.ndarray]], object]) -> bool:
        if not self._by_c or self.context.allocations.memory_of(buffer) != ALLOCATED:
            return False
        self._fence()
        run(self._everyone(buffer))
        self._fence()
        return True

    # Short arrays, in one call of C. Copies of even calls and of odd calls have two places, so that no fence is needed
    # after the sum: no rank is more than one call ahead of another. (The idea is that of DeepSpeed's shm.cpp.)

    def _copied(self, call: Call, op: Op) -> CWork:
        """Return the sum of all ranks' copies; each rank writes it to its own array. Local."""
        rows = [MPI.Get_address(row) for row in self._copies]
        parts = [*rows, *(row + self._half for row in rows)]
        return _sum(call.dtype, call.length, op, [], parts, self._copies)

    def _placed(self, buffer: np.ndarray, op: Op) -> CWork:
        """Return the sum of this rank's chunk, which it writes to all ranks' arrays. Local."""
        mine, everyone = self.owned(buffer.size), self._everyone(buffer)
        parts = [MPI.Get_address(array) + mine.start * buffer.itemsize for array in everyone]
        return _sum(buffer.dtype, mine.stop - mine.start, op, parts, [*parts, *parts])

    def _stages(self, call: Call, op: Op) -> CWork:
        """Return the sum of this rank's chunk, which it writes to its array and to all ranks' copies; then
        `_take_sums`. Local."""
        mine, size = self.owned(call.length), call.dtype.itemsize
        rows = [MPI.Get_address(row) + 2 * self._half for row in self._copies]
        words = [kernels.sum_address(call.dtype), double_word(op.scale), mine.stop - mine.start, call.length * size]
        return CWork("meet_and_stage", [*words, mine.start * size, mine.stop * size, *rows], self._copies)

    def _take_sums(self, call: Call, buffer: np.ndarray) -> None:
        """Wait for the sums of the other chunks, and copy them to an array. Collective."""
        mine, begin = self.owned(call.length), 2 * self._half
        sums = self._copies[self.rank, begin : begin + buffer.nbytes].view(buffer.dtype)
        self._fence()
        for span in (slice(0, mine.start), slice(mine.stop, buffer.size)):
            np.copyto(buffer[span], sums[span])

    def _address(self, buffer: np.ndarray) -> int:
        """Return the address of an array for the node's ranks; 0 if they can't reach it by CMA. Local."""
        return self._cma.address(buffer) if self._cma.works else 0

    def _everyone(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all ranks like `buffer`, which lies in memory from `allocate`. Local."""
        found = self.context.allocations.at(buffer)
        assert found is not None
        return found[0].views(found[1], buffer)

    def _in_place(self, kind: str, buffer: np.ndarray, op: Op) -> None:
        """Do a call of this kind on an array from `allocate`."""
        everyone = self._everyone(buffer)
        if kind == "all_reduce":
            self._reduce_in_place(everyone, op)
        elif kind == "reduce_scatter":
            for block in _blocks(self.owned(buffer.size), buffer.itemsize):
                self._combine([array[block] for array in everyone], [buffer[block]], op)
            self._fence()
        else:
            for rank in self._others():
                span = self.owned(buffer.size, rank)
                np.copyto(buffer[span], everyone[rank][span])
            self._fence()

    def _elsewhere(self, kind: str, buffer: np.ndarray, op: Op, addresses: list[int]) -> None:
        """Do a call of this kind on an array in ordinary memory. addresses: of all ranks' arrays."""
        if all(addresses):
            self._by_cma(kind, buffer, op, addresses)
            return
        if self._cma.works:
            notices.once(self.rank, STAGES)
        if kind == "all_gather":
            chunked.spread(self.comm, buffer, [self.owned(buffer.size, rank) for rank in range(self.size)])
        else:
            self._reduce_staged(buffer, op)

    # Arrays from allocate(), and the staging buffer: every rank reads and writes every rank's array

    def _reduce_in_place(self, everyone: Sequence[np.ndarray], op: Op) -> None:
        for block in _blocks(self.owned(everyone[0].size), everyone[0].itemsize):
            parts = [array[block] for array in everyone]
            self._combine(parts, parts, op)
        self._fence()

    # Other arrays, by CMA

    def _by_cma(self, kind: str, buffer: np.ndarray, op: Op, addresses: list[int]) -> None:
        if kind == "all_gather":
            for rank in self._others():
                span = self.owned(buffer.size, rank)
                if span.start < span.stop:
                    self._cma.read(rank, addresses[rank] + span.start * buffer.itemsize, buffer[span])
        else:
            nbytes = min(CMA_BYTES, FETCHED_BYTES // (self.size - 1))
            for block in segments(self.owned(buffer.size), max(nbytes // buffer.itemsize, 1)):
                mine = self._combine_by_cma(buffer, block, op, addresses)
                for rank in self._others() if kind == "all_reduce" else ():
                    self._cma.write(rank, addresses[rank] + block.start * buffer.itemsize, mine)
        self._fence()

    def _combine_by_cma(self, buffer: np.ndarray, block: slice, op: Op, addresses: list[int]) -> np.ndarray:
        """Combine all ranks' blocks into this rank's block of `buffer`, and return it."""
        mine = buffer[block]
        room = self.workspace.array("fetched", mine.size * (self.size - 1), mine.dtype)
        fetched = room.reshape(-1, mine.size)
        parts = [*fetched[: self.rank], mine, *fetched[self.rank :]]
        for rank in self._others():
            self._cma.read(rank, addresses[rank] + block.start * buffer.itemsize, parts[rank])
        self._combine(parts, [mine], op)
        return mine

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # Other arrays, where CMA does not work or takes longer

    def _reduce_staged(self, buffer: np.ndarray, op: Op) -> None:
        """All-reduce `buffer` piece by piece, as copies in the staging buffer."""
        self._grow_staging(buffer.nbytes)
        for piece in segments(slice(0, buffer.size), self._staging.shape[1] // buffer.itemsize):
            part = buffer[piece]
            everyone, mine = list(self._staging[:, : part.nbytes].view(part.dtype)), self.owned(part.size)
            copy, everyone[self.rank] = everyone[self.rank], part  # this rank's chunk stays where it is
            for span in (slice(0, mine.start), slice(mine.stop, part.size)):
                np.copyto(copy[span], part[span])
            self._fence()
            self._reduce_in_place(everyone, op)
            for span in (slice(0, mine.start), slice(mine.stop, part.size)):
                np.copyto(part[span], copy[span])

    def _grow_staging(self, nbytes: int) -> None:
        """Make the staging buffer large enough for arrays of `nbytes`, up to STAGING_BYTES. Collective."""
        wanted = min(1 << max(nbytes * self.size - 1, 1).bit_length(), STAGING_BYTES)
        if wanted > self._staging.size and self._may_grow:
            try:
                self._staging = self._make_staging(wanted)
            except UnavailableError:  # on all ranks, which keep the smaller one
                self._may_grow = False

    def _make_staging(self, nbytes: int) -> np.ndarray:
        """Return a staging buffer of `nbytes` or more for all ranks together: a row for each. Collective."""
        return shared_rows(self.comm, OFFSET + _row(nbytes, self.size))[:, OFFSET:]

    # Both

    def _combine(self, parts: list[np.ndarray], outs: list[np.ndarray], op: Op) -> None:
        """Combine the ranks' parts in rank order and write the finished result to `outs`, which may be some of them."""
        out = outs[0]
        if op.adds and kernels.sum_arrays(parts, outs, op.scale):
            return
        if not dtypes.is_half(out.dtype) and (out is parts[0] or len(parts) == 2):
            op.combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                op.combine(out, part, out=out)
            op.finish(out)
        else:
            for piece in segments(slice(0, out.size), CAST_LENGTH):
                casts.combine([part[piece] for part in parts], out[piece], op, self.workspace)
        for other in outs[1:]:
            np.copyto(other, out)


def _sum(
    dtype: np.dtype, length: int, op: Op, outs: list[int], parts: list[int], copies: np.ndarray | None = None
) -> CWork:
    """Return a sum of all ranks' parts. Local.

    outs: addresses of the arrays that get it; none: the array of the call gets it, and this rank's part is a copy of
    it, made before the ranks meet. parts: addresses of all ranks' parts in calls of even numbers, then of odd numbers.
    copies: their memory.
    """
    words = [kernels.sum_address(dtype), double_word(op.scale), length, length * dtype.itemsize, len(outs)]
    return CWork("meet_and_sum", [*words, *outs, *parts], copies)


def _row(nbytes: int, ranks: int) -> int:
    """Return the bytes of each rank in a buffer of `nbytes` or more."""
    return -(-nbytes // (ranks * CACHE_LINE)) * CACHE_LINE


def _divided(ranks: int, crowded: bool) -> tuple[int, int]:
    """Return how C uses a rank's row: the bytes for the copy of an even or odd call, and the room to stage an array."""
    row = _row(2 * STAGED_BYTES, ranks)
    half = row // 2 if crowded else min(row // 2, max(COPIED_BYTES))
    return half, row - 2 * half


def _is_copied(nbytes: float, allocated: bool, ranks: int, crowded: bool) -> bool:
    """Return whether the ranks copy an array that C sums, and add the copies. crowded: ranks outnumber cores."""
    of_allocated, of_others = CROWDED_BYTES if crowded else COPIED_BYTES
    return nbytes <= min(of_allocated if allocated else of_others, STAGED_BYTES // ranks)


def _stays_cached(nbytes: float, ranks: int) -> bool:
    """Return whether an all-reduce stages arrays that are not from `allocate` though CMA works."""
    return ranks > 1 and nbytes <= min(CACHED_BYTES, ALL_CACHED_BYTES // ranks)


def _blocks(span: slice, itemsize: int) -> Iterator[slice]:
    # Casting 16-bit floats costs more than a cache miss, so fewer and larger blocks are better for them.
    return segments(span, 2 * BLOCK_BYTES // itemsize if itemsize == 2 else BLOCK_BYTES // itemsize)
