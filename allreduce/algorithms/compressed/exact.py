"""Exact: sums of floats whose bits depend on nothing but the data, around any backend."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce.algorithm import Algorithm, Context, TwoPhase, Work
from allreduce.algorithms.compressed.compressed import Compressed
from allreduce.arrays import fixed_point, gpu, ops
from allreduce.arrays.arguments import is_flag, is_integer
from allreduce.arrays.chunks import chunk
from allreduce.arrays.fixed_point import BLOCK
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.call.call import Call
from allreduce.errors import NotAnArrayError, OptionError, UnsupportedOpError
from allreduce.kernels import FORMATS, MOST_TERMS
from allreduce.memory.allocations import Slice
from allreduce.transport.control import on_all_ranks

ONE_CALL_BYTES = 64 * 1024  # of integers; below, one all-reduce is faster than a reduce-scatter and an all-gather
KINDS = ("all_reduce", "reduce_scatter")  # of `sum_terms`


class Exact(Compressed):
    """Sums floats as integers of fixed point, by `inner`: the bits do not depend on order, ranks, nodes or algorithm.

    Of sums and means of float32, float64, float16 and bfloat16 arrays, each rank's array being one term, and of
    `sum_terms`. allreduce.arrays.fixed_point has the method and its error. Other dtypes are exact anyway. Needs the C
    library: UnavailableError on all ranks if one has none.

    Elements share an exponent in blocks of BLOCK, which begin at the parameters that `describe` names, else at the
    start of the array. So buckets have the bits of the whole array if they begin where parameters or blocks do.

    A call costs two all-reduces: of a byte for each block (float64: 4), and of 8 bytes an element, in memory that is
    kept. Where all ranks reach the others' arrays, it is one pass, and takes no memory. "max" and "min" give +0 for
    zeros of either sign, and one bit pattern for NaN; "prod" of floats raises UnsupportedOpError. In `sparse` the rows
    of a rank are one term.
    """

    sums_terms = True
    dense_rows = True  # each rank's rows are one term

    def __init__(self, context: Context, *, inner: Algorithm) -> None:
        super().__init__(context, inner=inner)
        self.check_kernels("exact=True")
        self.sums_half = True  # as float64
        self.lossless = self
        self.terms: Sequence[Any] = ()  # of the running sum_terms
        # (address of an array, first element, length) -> its parts when the edges were made, the edges of its blocks
        self._edges: dict[tuple[int, int, int], tuple[Sequence[Part], np.ndarray]] = {}

    # sum_terms, see AllReduce. `terms` is set during a call.

    def describe_sum(self, call: Call, op: Op, terms: Any, count: Any, kind: str) -> Call:
        """Check the terms of this rank, and return the call with their properties to compare. Local."""
        if kind not in KINDS:
            raise OptionError(f"sum_terms(kind={kind!r}): use one of {', '.join(KINDS)}")
        _check_terms(call, op, count, terms)
        return call._replace(shape=(int(count), KINDS.index(kind)))

    def work(self, call: Call, op: Op) -> Work:
        if call.kind == "sum_terms":
            return self._terms_work(call, op)
        if call.dtype in FORMATS and call.op in ("max", "min") and self.size > 1 and call.kind != "all_gather":
            return super(Compressed, self).work(call, op)._replace(place=self.place)
        return super().work(call, op)

    def _terms_work(self, call: Call, op: Op) -> Work:
        assert call.shape is not None
        count, scatters = call.shape[0], KINDS[call.shape[1]] == "reduce_scatter"

        def run(buffer: Any) -> None:
            edges = self._edges_of(buffer.size, self.find(buffer))
            terms = [np.require(gpu.on_host(term), requirements="A") for term in self.terms]
            if call.memory == GPU:
                add_up = partial(self._add_up, terms, count, op, edges=edges)
                self.context.stage(buffer, slice(0), add_up, slice(None))
            else:
                self._add_up(terms, count, op, buffer, edges, scatters)

        return Work(run, place=self.place)

    def _largest(self, own: np.ndarray, passed: int, count: int) -> np.ndarray:
        """Return the maximum of all ranks' exponents; raise OptionError if they pass more than `count` terms.

        own: this rank's. passed: how many terms this rank passes. Collective, in one message.
        """
        numbers = np.zeros(self.size, np.int32)
        numbers[self.rank] = passed  # the maximum of the bytes of all ranks' arrays holds every rank's number
        joined = np.concatenate([own, numbers.view(own.dtype)])
        self._combine(joined, "max")
        total = int(np.frombuffer(joined[own.size :].tobytes(), np.int32).sum(dtype=np.int64))
        if total > count:
            raise on_all_ranks(OptionError(f"count={count}: the ranks pass {total} terms"), self.context.topology.world)
        return joined[: own.size]

    # The sum

    def reduce_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        edges = self._edges_of(buffer.size, where)

        def add_up(everyone: list[np.ndarray]) -> None:
            own = chunk(edges.size - 1, self.size, self.rank)
            mine, mean = edges[own.start : own.stop + 1], op.name == "mean"
            fixed_point.sum_blocks(everyone, self.size, mean, mine, everyone)

        if not (isinstance(self.inner, TwoPhase) and self.inner.in_everyones_array(buffer, add_up)):
            self._add_up([buffer], self.size, op, buffer, edges)

    def scatter_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        self._add_up([buffer], self.size, op, buffer, self._edges_of(buffer.size, where), scatters=True)

    def _add_up(
        self,
        terms: Sequence[np.ndarray],
        count: int,
        op: Op,
        out: np.ndarray,
        edges: np.ndarray,
        scatters: bool = False,
    ) -> None:
        """Sum the terms of all ranks into `out`. Collective. scatters: only the owned slice of `out` is needed."""
        if not out.size:
            return
        form, mean = FORMATS[out.dtype], op.name == "mean"
        largest = self._largest(fixed_point.exponents(terms, edges, form), len(terms), count)
        marks = None
        if (largest == form.not_finite).any():
            terms, marks = fixed_point.without_marks(terms, out.size, form)
            self._combine(marks, "sum")
            largest = self._largest(fixed_point.exponents(terms, edges, form), len(terms), count)
        integers = self.from_inner(out.size, form.carrier)
        fixed_point.add(terms, largest, count, edges, form, integers)

        def finish(part: slice) -> None:
            fixed_point.finish(integers, largest, count, mean, edges, form, out, part)
            if marks is not None:
                fixed_point.write_marks(marks, out, part)

        if (integers.nbytes >= ONE_CALL_BYTES or scatters) and self.size > 1 and isinstance(self.inner, TwoPhase):
            self.inner.reduce_scatter(integers, ops.OPS["sum"])
            finish(self.owned(out.size))
            if not scatters:
                self.inner.all_gather(out)
            return
        self._combine(integers, "sum")
        finish(slice(0, out.size))

    def _combine(self, array: np.ndarray, op: str) -> None:
        """Reduce an array by the inner algorithm. Collective."""
        if self.size > 1:
            self.inner.reduce(array, ops.resolve(op, array.dtype, self.size))

    def _edges_of(self, length: int, where: Slice | None) -> np.ndarray:
        """Return the edges of an array's blocks. where: this array as a slice of an array of the table, or None."""
        if where is None:
            return fixed_point.block_edges(length)
        key = where.entry.begin, where.start, length
        parts, edges = self._edges.get(key, (None, None))
        if edges is None or parts is not where.entry.parts:
            parts, edges = where.entry.parts, fixed_point.block_edges(length, tuple(_starts(where)))
            self._edges[key] = parts, edges
        return edges

    # The methods of Compressed

    def find(self, buffer: Any) -> Slice | None:
        return self.context.allocations.find(buffer, scratch=True)  # blocks begin at parameters in any memory

    def compresses(self, dtype: np.dtype, op: Op) -> bool:
        return self.size > 1 and dtype in FORMATS and op.adds

    def resolve(self, op: str, dtype: np.dtype) -> Op:
        resolved = super().resolve(op, dtype)
        if resolved.name == "prod" and dtype in FORMATS:
            raise UnsupportedOpError(
                f'exact=True: the bits of a product of {dtype} depend on the order of its factors; use "sum", "mean", '
                '"max" or "min", or a backend without exact=True'
            )
        return resolved

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if buffer.dtype not in FORMATS or self.compresses(buffer.dtype, op):
            super().reduce(buffer, op)
            return
        wide = buffer.astype(FORMATS[buffer.dtype].wide, copy=False)  # not every inner algorithm has 16-bit floats
        self.inner.reduce(wide, op)
        wide += 0.0  # one bit pattern for zeros, and one for NaN
        wide[np.isnan(wide)] = np.nan
        if wide is not buffer:
            np.copyto(buffer, wide, casting="unsafe")

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        if buffer.dtype in FORMATS:
            self.reduce(buffer, op)
        else:
            super().reduce_scatter(buffer, op)

    scatter = reduce_scatter


def _check_terms(call: Call, op: Op, count: Any, terms: Any) -> None:
    """Raise the error if these can't be terms of a sum into an array. Local."""
    if call.dtype not in FORMATS or op.name not in ("sum", "mean") or len(call.shape or ()) != 1:
        raise UnsupportedOpError(
            f'sum_terms() is "sum" or "mean" of 1-D arrays of floats, not "{op.name}" of {call.dtype} of shape '
            f"{call.shape}"
        )
    if not is_integer(count, 1, MOST_TERMS):
        raise OptionError(f"count must be an integer from 1 to {MOST_TERMS}, got {count!r}")
    for term in terms:
        fits = isinstance(term, np.ndarray) or gpu.is_gpu_array(term)
        if not fits or (term.shape, term.dtype) != ((call.length,), call.dtype) or not term.flags.c_contiguous:
            shown = f"{term.dtype} of shape {term.shape}" if fits else type(term).__qualname__
            raise NotAnArrayError(
                f"sum_terms() takes terms that are contiguous arrays of {call.dtype} of length {call.length}, as `out` "
                f"is, not {shown}"
            )
        if gpu.is_gpu_array(term) != (call.memory == GPU):
            raise NotAnArrayError("sum_terms(): the terms and `out` must be on one device")


def _starts(where: Slice) -> list[int]:
    """Return where blocks begin anew in a slice of an array of the table: at parts, and after its first block."""
    edges = sorted({0, *(edge for part in where.entry.parts for edge in (part.start, part.stop))})
    before = [edge for edge in edges if edge <= where.start][-1]
    inside = {edge - where.start for edge in edges if where.start < edge < where.start + where.length}
    rest = -(where.start - before) % BLOCK  # elements of the block in which the slice begins
    if 0 < rest < min(inside | {where.length}):
        inside.add(rest)
    return [0, *sorted(inside)]


def check_exact(name: str, sums: bool, exact: Any, compress: Any) -> None:
    """Raise OptionError if these arguments of `create` are invalid. sums: whether the backend `name` does. Local."""
    if not is_flag(exact):
        raise OptionError(f"exact={exact!r}: use True or False")
    if exact and compress is not None:
        raise OptionError(
            f"exact=True and compress={compress!r} exclude each other: a compression rounds, and "
            "exact=True keeps all bits; leave one of them out"
        )
    if exact and not sums:
        raise OptionError(f'exact=True: {name!r} does not sum; use "auto" or another backend')
