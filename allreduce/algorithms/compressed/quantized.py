"""EightBits: sends float32 and float64 arrays with 8 bits an element, and adds the errors in the next call."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from allreduce.algorithm import Algorithm, Context
from allreduce.algorithms.compressed.compressed import Compressed
from allreduce.arrays import quantize
from allreduce.arrays.chunks import chunk, segments
from allreduce.arrays.compression import Quantized
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.memory.allocations import Slice
from allreduce.transport.point_to_point import Arrival, Transfer
from allreduce.transport.wait import wait

SEGMENT = 56 * 1024  # elements of a message: below 64 KiB, which MPI libraries send at once, without a handshake
ALIGNMENT = 64  # bytes
SHORTEST = 4096  # elements: shorter arrays are not compressed
LONGEST_VECTOR = 64 * 1024  # elements: longer parameters of one dimension are compressed
FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)


class EightBits(Compressed):
    """Reduce-scatter of 8-bit codes, sums in float32, all-gather of 8-bit codes (see allreduce.arrays.quantize).

    The owner of a slice adds its exact values and the others' decoded ones in rank order. It sends the codes of the sum
    to all ranks, which decode them, the owner too, so all have the same bits. Each value is rounded twice. float64
    arrays are sent as float32. Bytes sent per rank: S / 2 (n - 1) / n of float32 arrays, and a float32 for each block.

    Error feedback, for arrays from `allocate`: what a call has not sent is added in the next one; the owner keeps the
    error of the sum, too (S. P. Karimireddy et al.: Error feedback fixes SignSGD, 2019, has no such error). Blocks with
    an infinity or NaN become infinities or NaNs on all ranks, and leave no error. `inner` reduces arrays below SHORTEST
    elements, and described vectors of up to LONGEST_VECTOR elements (biases, norms), without compression.
    """

    def __init__(self, context: Context, *, inner: Algorithm, options: Quantized) -> None:
        super().__init__(context, inner=inner)
        self.check_kernels(f"compress={str(options)!r}")
        self.options = options
        self._quantizer = quantize.Quantizer(options.block_size)
        self._step = max(SEGMENT // options.block_size, 1) * options.block_size
        self._calls = 0  # calls with arrays that have no state
        self._transfer = Transfer(self.comm, self.workspace, context.tag)
        self._others = [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def reduce_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        spans = [chunk(buffer.size, self.size, rank) for rank in range(self.size)]
        self._reduce_spans(buffer, op, where, parts, spans, gathers=True)

    def scatter_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        spans = [self.owned(buffer.size, rank) for rank in range(self.size)]
        if sum(span.stop - span.start for span in spans) == buffer.size:
            self._reduce_spans(buffer, op, where, parts, spans, gathers=False)
        else:  # several ranks own the same elements
            self.reduce_parts(buffer, op, where, parts)

    def _reduce_spans(
        self,
        buffer: np.ndarray,
        op: Op,
        where: Slice | None,
        parts: Sequence[Part],
        spans: Sequence[slice],
        gathers: bool,
    ) -> None:
        """Reduce `buffer`, of which rank r owns `spans[r]`. gathers: False: each rank needs only its own slice."""
        if buffer.size < SHORTEST:
            self.inner.reduce(buffer, op)
            return
        vectors = _vectors(where, parts)
        packed = self._reduce_apart(buffer, op, vectors)
        residual = where.residual if where and self.options.error_feedback else None
        self._seed(where)
        sends = list(self._scatter(buffer, residual, spans))
        sends += self._collect(buffer, residual, spans[self.rank], op, gathers)
        if gathers:
            self._gather(buffer, spans)
        wait(*sends)
        for part, values in zip(vectors, packed, strict=True):
            buffer[part.start : part.stop] = values

    def _reduce_apart(self, buffer: np.ndarray, op: Op, parts: Sequence[Part]) -> list[np.ndarray]:
        """Reduce `parts` of `buffer` together through `inner`; return the results. The parts are left as zeros."""
        if not parts:
            return []
        ends = np.cumsum([part.stop - part.start for part in parts]).tolist()
        whole = self.workspace.array("apart", ends[-1], buffer.dtype)
        packed = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        for part, values in zip(parts, packed, strict=True):
            values[...] = buffer[part.start : part.stop]
            buffer[part.start : part.stop] = 0  # so they don't change the scales of their neighbours
        self.inner.reduce(whole, op)
        return packed

    def _seed(self, where: Slice | None) -> None:
        if where is None:
            self._calls += 1
            count, place = self._calls, (-1, 0, 0)
        else:
            count, place = where.count_call(), (where.start, where.length, where.entry.length)
        self._quantizer.seed(self.options.seed, self.rank, count, *place)

    # The three phases

    def _scatter(
        self, buffer: np.ndarray, residual: np.ndarray | None, spans: Sequence[slice]
    ) -> Iterator[MPI.Request]:
        """Send the codes of the other ranks' slices; the first segments first. Yield the requests."""
        cut = {owner: list(segments(spans[owner], self._step)) for owner in self._others}
        messages = self._messages("scattered", [part for parts in cut.values() for part in parts])
        rows = max(map(len, cut.values()))
        for row in range(rows):
            for owner, parts in cut.items():
                if row < len(parts):
                    message = next(messages)[: self._nbytes(parts[row])]
                    values = self._with_residual(buffer, residual, parts[row])
                    self._encode(values, message, residual, parts[row])
                    yield self._transfer.start(message, owner)

    def _collect(
        self, buffer: np.ndarray, residual: np.ndarray | None, span: slice, op: Op, gathers: bool
    ) -> list[MPI.Request]:
        """Finish this rank's slice, segment by segment, and send its codes to all ranks. Return the requests."""
        parts = list(segments(span, self._step))
        ranks = range(self.size)
        arrivals = self._arrivals((rank, part) for part in parts for rank in ranks if rank != self.rank)
        messages = self._messages("collected", parts)
        sends = []
        for part in parts:
            total = self._sum(buffer, residual, part, arrivals)
            if not gathers:
                op.finish(total)
                buffer[part] = total
                if residual is not None:
                    residual[part] = 0
                continue
            message = next(messages)[: self._nbytes(part)]
            self._encode(total, message, residual, part, 1.0 if op.scale is None else op.scale)
            sends += [self._transfer.start(message, dest) for dest in self._others]
            self._quantizer.decode(message, buffer[part])
        return sends

    def _gather(self, buffer: np.ndarray, spans: Sequence[slice]) -> None:
        """Receive and decode the other ranks' slices."""
        cut = [(owner, list(segments(spans[owner], self._step))) for owner in reversed(self._others)]
        rows = max(len(parts) for _, parts in cut)
        expected = [(owner, parts[row]) for row in range(rows) for owner, parts in cut if row < len(parts)]
        for (_, part), message in zip(expected, self._arrivals(expected), strict=True):
            self._quantizer.decode(message, buffer[part])

    # Segments

    def _sum(
        self, buffer: np.ndarray, residual: np.ndarray | None, part: slice, arrivals: Iterator[np.ndarray]
    ) -> np.ndarray:
        """Return the sum of all ranks' values of a segment of this rank's slice, in rank order: float32 scratch."""
        total = self.workspace.array("total", part.stop - part.start, FLOAT)
        for rank in range(self.size):
            if rank != self.rank and rank == 0:
                self._quantizer.decode(next(arrivals), total)
            elif rank != self.rank:
                self._quantizer.add(next(arrivals), total)
            elif rank == 0:
                total[...] = self._with_residual(buffer, residual, part)
            else:
                total += self._with_residual(buffer, residual, part)
        return total

    def _with_residual(self, buffer: np.ndarray, residual: np.ndarray | None, part: slice) -> np.ndarray:
        """Return a segment plus its error feedback, as float32: of float32 arrays a view of `buffer`."""
        values = buffer[part]
        if residual is not None:
            np.add(values, residual[part], out=values)
        if values.dtype == FLOAT:
            return values
        short = self.workspace.array("float32", values.size, FLOAT)
        np.copyto(short, values, casting="unsafe")
        return short

    def _encode(
        self, values: np.ndarray, message: np.ndarray, residual: np.ndarray | None, part: slice, factor: float = 1.0
    ) -> None:
        """Write the message of a segment, and its error feedback. `values` may be overwritten."""
        if residual is None or residual.dtype == FLOAT:
            self._quantizer.encode(values, message, None if residual is None else residual[part], factor)
        else:
            self._quantizer.encode(values, message, values, factor)
            residual[part] = values

    def _nbytes(self, part: slice) -> int:
        return self._quantizer.nbytes(part.stop - part.start)

    def _messages(self, name: str, parts: Sequence[slice]) -> Iterator[np.ndarray]:
        """Yield memory for the message of each of `parts`, in scratch memory that holds all of them."""
        room = -(-max((self._nbytes(part) for part in parts), default=0) // ALIGNMENT) * ALIGNMENT
        yield from self.workspace.array(name, room * len(parts), BYTE).reshape(len(parts), room)

    def _arrivals(self, expected: Iterable[tuple[int, slice]]) -> Iterator[np.ndarray]:
        """Receive the messages of segments: pairs of a rank and a segment."""
        shapes = ((rank, np.broadcast_to(BYTE.type(0), self._nbytes(part))) for rank, part in expected)
        return self._transfer.arrivals(Arrival(rank, shape) for rank, shape in shapes)


def _vectors(where: Slice | None, parts: Sequence[Part]) -> list[Part]:
    """Return the parts that belong to described parameters of one dimension, of at most LONGEST_VECTOR elements."""
    if where is None:
        return []
    names = {
        part.name for part in where.entry.parts if len(part.shape) < 2 and part.stop - part.start <= LONGEST_VECTOR
    }
    return [part for part in parts if part.name in names] if names else []
