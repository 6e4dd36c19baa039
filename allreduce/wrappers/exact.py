"""Exact: sums of floats whose bits depend on nothing but the data, around any backend."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.arrays import fixed_point, gpu, ops, trees
from allreduce.arrays.fixed_point import BLOCK, FORMATS, MOST_TERMS, Layout
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Slice
from allreduce.arrays.rows import Rows, merge_indices
from allreduce.backend import AllReduce, TwoPhase
from allreduce.engine import call as records
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Trial, Work
from allreduce.errors import NotAnArrayError, OptionError, UnsupportedOpError
from allreduce.topology import Topology
from allreduce.transport import chunked
from allreduce.transport.control import combine, on_all_ranks
from allreduce.transport.shared_segment import Location
from allreduce.wrappers.compressed import Compressed

ONE_CALL_BYTES = 64 * 1024  # of integers; below, one all-reduce is faster than a reduce-scatter and an all-gather


class Exact(Compressed):
    """Sums floats as integers of fixed point, by `inner`: the bits do not depend on order, ranks, nodes or algorithm.

    Sums and means of float32, float64, float16 and bfloat16 arrays, each rank's array being one term, and `sum_terms`,
    with several terms a rank. allreduce.arrays.fixed_point explains the method, its error and its treatment of
    infinities and NaN. Elements share an exponent in blocks of BLOCK elements, which begin at the start of each
    parameter that `describe` names, else at the start of the array that was allocated, or given. So buckets have the
    bits of the whole array if they begin where parameters or blocks do.

    A call costs two all-reduces: of the exponents, a byte for BLOCK elements (float64: 4 bytes), and of the integers,
    8 bytes an element; and three passes over the array. Memory: 8 bytes an element of the longest array, allocated by
    the inner backend and reused.

    "max" and "min" of floats give +0 for zeros of either sign, and one bit pattern for NaN. "prod" of floats raises
    UnsupportedOpError: its bits would depend on the order. Arrays of a tree have the bits that they have alone.
    `sparse` adds the rows of one rank with equal indices first, in their order; each rank's rows are one term.
    Integers, `broadcast`, `stack` and `all_gather` are exact anyway. With one rank calls change nothing.

    J. Demmel, H. D. Nguyen: Parallel reproducible summation, 2015.
    """

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self.sums_half = True  # as float64
        self._summing: dict[Call, Callable[[Any], None]] = {}  # the functions that run `sum_terms`
        self._terms: Sequence[Any] = ()  # of the running `sum_terms`
        # (address of a registered array, first element, length) -> its parts when the layout was made, the layout
        self._block_layouts: dict[tuple[int, int, int], tuple[Sequence[Part], Layout]] = {}
        self._described: dict[Any, trees.Group] = {}  # whose arrays a tree's buffer holds

    # What users call

    @property
    def exact(self) -> AllReduce:
        return self

    def sum_terms(self, terms: Any, out: Any, op: str = "sum", count: int = 1, kind: str = "all_reduce") -> Any:
        """Reduce several terms of each rank: each is rounded alone, so it does not matter which rank has which term.

        terms: this rank's terms: an array (k, length), or a sequence of k arrays of `length` elements, 1-D and
            contiguous; k may differ between ranks, and be 0. Not changed, unless `out` is one of them.
        out: 1-D, contiguous, `length` elements of the terms' dtype; overwritten by the result.
        op: "sum", or "mean": the sum divided by `count`.
        count: the number of all terms of all ranks, or more: then the others are zeros. The same on all ranks; it
            decides how terms are rounded (see fixed_point). Also on one rank, terms are rounded so.
        kind: "reduce_scatter": only this rank's `owned` slice of `out` is defined afterwards.

        Collective. Returns `out`, or the owned slice, a view. Raises OptionError, on all ranks, if they pass more than
        `count` terms, and the errors of a call.
        """

        def describe() -> tuple[Call, Op]:
            if kind not in KINDS:
                raise OptionError(f"sum_terms(kind={kind!r}): use one of {', '.join(KINDS)}")
            call = records.array_call(kind, out, op, self._memory_kind(out))
            resolved = self._resolve(op, call.dtype)
            _check_terms(call, resolved, count, terms)
            call = call._replace(kind="sum_terms", op=resolved.name, shape=(int(count), KINDS.index(kind)))
            return call, resolved

        call, resolved = self._agree_on(describe)
        run = self._summing.get(call)
        if run is None:
            admitted = self._engine.admit(call, resolved, self._terms_work(call), None, self._locator_for(call))
            run = self._summing[call] = self._engine.prepare(admitted)
        self._terms = terms
        try:
            run(out)
        finally:
            self._terms = ()
        return out if kind == "all_reduce" else out[self.owned(out.size)]

    def _terms_work(self, call: Call) -> Work:
        """Return the function that does `sum_terms` for calls like `call`."""
        assert call.shape is not None
        count, scatters = call.shape[0], KINDS[call.shape[1]] == "reduce_scatter"

        def work(buffer: Any, op: Op) -> None:
            passed = combine(self._comm, np.array([len(self._terms)], np.int64), "count the terms")[0]
            if passed > count:
                raise on_all_ranks(
                    OptionError(f"sum_terms(count={count}): the ranks pass {passed} terms"), self.topology.world
                )
            layout = self._layout(buffer.size, self.registered.find(buffer))
            if call.memory == GPU:
                terms = [term.get() for term in self._terms]
                self._stage(buffer, slice(0), lambda host: self._add_up(terms, count, op, host, layout), slice(None))
            else:
                self._add_up(self._terms, count, op, buffer, layout, scatters)

        return work

    # The sum

    def _reduce_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        self._add_up([buffer], self.size, op, buffer, self._layout(buffer.size, where))

    def _scatter_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        self._add_up([buffer], self.size, op, buffer, self._layout(buffer.size, where), scatters=True)

    def _add_up(
        self,
        terms: Sequence[np.ndarray],
        count: int,
        op: Op,
        out: np.ndarray,
        layout: Layout,
        scatters: bool = False,
    ) -> None:
        """Sum the terms of all ranks into `out`. Collective. scatters: only the owned slice of `out` is needed."""
        if not layout.length:
            return
        form, mean, scratch = FORMATS[out.dtype], op.name == "mean", self.workspace
        largest = fixed_point.exponents(terms, layout, form, scratch)
        self._combine(largest, "max")
        special = fixed_point.special(terms, largest, layout, form)
        if special is not None:
            packed = special.packed()
            self._combine(packed, "max")
            special = special.unpacked(packed)
            largest[special.blocks] = special.exponents
        integers = self._from_inner(layout.length, form.carrier)
        fixed_point.add(terms, largest, count, layout, form, scratch, integers, finite=special is None)
        phases = self.inner.phases if isinstance(self.inner, TwoPhase) and self.size > 1 else None
        if phases is None or (integers.nbytes < ONE_CALL_BYTES and not scatters):
            part, phases = slice(0, layout.length), None
            self._combine(integers, "sum")
        else:
            part = self.owned(layout.length)
            phases.reduce_scatter(integers, ops.OPS["sum"])
        fixed_point.finish(integers, largest, count, mean, layout, form, scratch, out, part)
        if special is not None:
            fixed_point.finish_special(special, out, part)
        if phases is not None and not scatters:
            phases.all_gather(out)

    def _combine(self, array: np.ndarray, op: str) -> None:
        """Reduce an array of integers by the inner backend. Collective."""
        if self.size > 1:
            self.inner.hooks.reduce(array, ops.resolve(op, array.dtype, self.size))

    def _layout(self, length: int, where: Slice | None) -> Layout:
        """Return the blocks of an array. where: the slice of a registered array that it is, or None."""
        if where is None:
            return fixed_point.layout_of(length)
        key = where.entry.begin, where.start, length
        parts, layout = self._block_layouts.get(key, (None, None))
        if layout is None or parts is not where.entry.parts:
            parts, layout = where.entry.parts, fixed_point.layout_of(length, tuple(_starts(where)))
            self._block_layouts[key] = parts, layout
        return layout

    # Hooks of AllReduce and Compressed

    def _compresses(self, dtype: np.dtype, op: str) -> bool:
        return self.size > 1 and dtype in FORMATS and op in ("sum", "mean")

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        resolved = super()._resolve(op, dtype)
        if resolved.name == "prod" and dtype in FORMATS:
            raise UnsupportedOpError(
                f'exact=True: the bits of a product of {dtype} depend on the order of its factors; use "sum", "mean", '
                '"max" or "min", or a backend without exact=True'
            )
        return resolved

    def _route(self, call: Call) -> Work | Trial:
        extreme = self.size > 1 and call.length and call.dtype in FORMATS and call.op in ("max", "min")
        if not extreme:
            return super()._route(call)
        return self._reduce_gpu if call.memory == GPU else self._reduce

    def _locator_for(self, call: Call) -> Locate | None:
        return self._block_place if call.dtype in FORMATS else super()._locator_for(call)

    def _block_place(self, buffer: Any) -> Location | None:
        """Return the blocks of an array and its position, which must be equal on all ranks."""
        where = self.registered.find(buffer)
        if where is None:
            return None
        return self._layout(buffer.size, where).number, where.start * buffer.dtype.itemsize

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        if buffer.dtype not in FORMATS or self._compresses(buffer.dtype, op.name):
            super()._reduce(buffer, op)
            return
        wide = buffer.astype(FORMATS[buffer.dtype].wide, copy=False)  # not every inner backend has 16-bit floats
        self.inner.hooks.reduce(wide, op)
        _unify(wide)
        if wide is not buffer:
            np.copyto(buffer, wide, casting="unsafe")

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        if buffer.dtype in FORMATS:
            self._reduce(buffer, op)
        else:
            super()._scatter_rounded(buffer, op)

    def _add_rows(self, indices: np.ndarray, values: np.ndarray, op: Op) -> Rows:
        if self.size == 1:
            return super()._add_rows(indices, values, op)
        counts = chunked.counts(self._comm, indices.size)
        found, places = merge_indices(chunked.gather(self._comm, indices, counts), counts)
        sums = np.zeros((found.size, values.shape[1]), values.dtype)
        sums[places[self.rank]] = values
        if sums.size:
            self._reduce(sums.reshape(-1), op)
        return found, sums

    def _tree_buffer(self, group: trees.Group) -> Any:
        buffer = super()._tree_buffer(group)
        if group.dtype in FORMATS and self._described.get((group.dtype, group.device)) is not group:
            self.describe(buffer, [Part(str(number), part.start, shape) for number, part, shape in group.places])
            self._described[group.dtype, group.device] = group
        return buffer

    def _forget(self) -> None:
        super()._forget()
        self._summing.clear()
        self._block_layouts.clear()
        self._described.clear()


KINDS = ("all_reduce", "reduce_scatter")  # of `sum_terms`


def _check_terms(call: Call, op: Op, count: Any, terms: Any) -> None:
    """Raise the error if these can't be terms of a sum into an array. Local."""
    if call.dtype not in FORMATS or op.name not in ("sum", "mean") or len(call.shape or ()) != 1:
        raise UnsupportedOpError(
            f'sum_terms() is "sum" or "mean" of 1-D arrays of floats, not "{op.name}" of {call.dtype} of shape '
            f"{call.shape}"
        )
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 1 <= count <= MOST_TERMS:
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
    """Return where blocks begin anew in a slice of a registered array: at parts, and where its first block ends."""
    edges = sorted({0, *(edge for part in where.entry.parts for edge in (part.start, part.stop))})
    before = [edge for edge in edges if edge <= where.start][-1]
    inside = {edge - where.start for edge in edges if where.start < edge < where.start + where.length}
    rest = -(where.start - before) % BLOCK  # elements of the block in which the slice begins
    if 0 < rest < min(inside | {where.length}):
        inside.add(rest)
    return [0, *sorted(inside)]


def _unify(values: np.ndarray) -> None:
    """Give zeros and NaN one bit pattern, in place."""
    values += 0.0
    values[np.isnan(values)] = np.nan


def check_exact(name: str, sums: bool, exact: Any, compress: Any) -> None:
    """Raise OptionError if these arguments of `create` are invalid. sums: whether the backend `name` does. Local."""
    if not isinstance(exact, bool):
        raise OptionError(f"exact={exact!r}: use True or False")
    if exact and compress is not None:
        raise OptionError(
            f"exact=True and compress={compress!r} exclude each other: a compression rounds, and "
            "exact=True keeps all bits; leave one of them out"
        )
    if exact and not sums:
        raise OptionError(f'exact=True: {name!r} does not sum; use "auto" or another backend')
