"""Exact: sums of floats whose bits depend on nothing but the data, around any backend."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allreduce.arrays import fixed_point, gpu, ops, products, trees
from allreduce.arrays.fixed_point import BLOCK, FORMATS, MOST_TERMS, Layout
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Slice
from allreduce.arrays.rows import Rows, merge_indices
from allreduce.backend import AllReduce
from allreduce.engine import call as records
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Work
from allreduce.errors import NotAnArrayError, OptionError, UnsupportedOpError
from allreduce.topology import Topology
from allreduce.transport import chunked
from allreduce.transport.control import on_all_ranks
from allreduce.transport.shared_segment import Location
from allreduce.wrappers.compressed import Compressed

ONE_CALL_BYTES = 64 * 1024  # of integers; below, one all-reduce is faster than a reduce-scatter and an all-gather


class Exact(Compressed):
    """Sums floats as integers of fixed point, by `inner`: the bits do not depend on order, ranks, nodes or algorithm.

    Sums and means of float32, float64, float16 and bfloat16 arrays, each rank's array being one term, and `sum_terms`,
    with several terms a rank. allreduce.arrays.fixed_point explains the method, its error and its treatment of
    infinities and NaN; allreduce.arrays.products those of `sum_products`, which sums products of rows.

    Elements share an exponent in blocks of BLOCK elements, which begin at the start of each parameter that `describe`
    names, else at the start of the array that was allocated, or given. So buckets have the bits of the whole array if
    they begin where parameters or blocks do.

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
        # the functions that run `sum_terms` and `sum_products`, and the terms or pairs of the running one
        self._summing: dict[Call, Callable[[Any], None]] = {}
        self._terms: Sequence[Any] = ()
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
            call, resolved = self._describe_sum("sum_terms", out, op, kind)
            _check_terms(call, resolved, count, terms)
            return call._replace(shape=(int(count), KINDS.index(kind))), resolved

        return self._sum(describe, terms, out, kind)

    def sum_products(self, pairs: Any, out: Any, op: str = "sum", count: int = 1, kind: str = "all_reduce") -> Any:
        """Sum the outer products of rows: the gradients of dense layers, from their inputs and the errors of their
        outputs. It does not matter which rank has which rows.

        pairs: a sequence of pairs of 2-D float32 arrays, (k, inputs) and (k, outputs); k, the number of this rank's
            rows, may differ between ranks, and be 0. Not changed.
        out: 1-D, contiguous, float32; overwritten by left.T @ right, summed over all ranks' rows, of one pair after
            the other.
        op: "sum", or "mean": the sum divided by `count`.
        count: the number of all rows of all ranks, or more; at most 32768. The same on all ranks; it decides how
            elements are rounded (see products).
        kind: as for `sum_terms`.

        The elements of the pairs are rounded once, so that a float64 matrix product of each pair and rank is exact, and
        the result is rounded once; also on one rank. It costs two all-reduces: of exponents, a byte for each column of
        the pairs, and of the sums, 8 bytes an element of `out`.

        Collective. Returns `out`, or the owned slice, a view. Raises OptionError, on all ranks, if they pass more than
        `count` rows, and the errors of a call.
        """

        def describe() -> tuple[Call, Op]:
            call, resolved = self._describe_sum("sum_products", out, op, kind)
            sizes = _check_pairs(call, resolved, count, pairs)
            return call._replace(shape=(int(count), KINDS.index(kind), *sizes)), resolved

        return self._sum(describe, pairs, out, kind)

    def _describe_sum(self, name: str, out: Any, op: str, kind: str) -> tuple[Call, Op]:
        """Return the record of a call of the method `name`, and its operation. Local."""
        if kind not in KINDS:
            raise OptionError(f"{name}(kind={kind!r}): use one of {', '.join(KINDS)}")
        call = records.array_call(kind, out, op, self._memory_kind(out))
        resolved = self._resolve(op, call.dtype)
        return call._replace(kind=name, op=resolved.name), resolved

    def _sum(self, describe: Callable[[], tuple[Call, Op]], terms: Any, out: Any, kind: str) -> Any:
        """Sum the terms, or the pairs, of all ranks into `out`. Returns the defined part. Collective."""
        call, resolved = self._agree_on(describe)
        run = self._summing.get(call)
        if run is None:
            work = self._terms_work(call) if call.kind == "sum_terms" else self._pairs_work(call)
            admitted = self._engine.admit(call, resolved, work, self._locator_for(call))
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
            layout = self._layout(buffer.size, self.registered.find(buffer))
            if call.memory == GPU:
                terms = [term.get() for term in self._terms]
                self._stage(buffer, slice(0), lambda host: self._add_up(terms, count, op, host, layout), slice(None))
            else:
                self._add_up(self._terms, count, op, buffer, layout, scatters)

        return work

    def _pairs_work(self, call: Call) -> Work:
        """Return the function that does `sum_products` for calls like `call`."""
        assert call.shape is not None
        count, scatters = call.shape[0], KINDS[call.shape[1]] == "reduce_scatter"

        def work(buffer: np.ndarray, op: Op) -> None:
            pairs: Sequence[products.Pair] = self._terms
            if not buffer.size:
                return
            largest = self._largest(products.exponents(pairs), len(pairs[0][0]), count, "rows")
            special = products.special(pairs, largest, buffer.size)
            if special is not None:
                self._combine(special.reshape(-1), "max")
            wide = self._from_inner(buffer.size, FORMATS[buffer.dtype].carrier)
            products.multiply(pairs, largest, count, self.workspace, wide)

            def finish(part: slice) -> None:
                products.finish(wide, count if op.name == "mean" else 1, buffer, part)
                if special is not None:
                    products.finish_special(special, buffer, part)

            self._finish_sums(wide, finish, buffer, scatters)

        return work

    def _largest(self, own: np.ndarray, passed: int, count: int, what: str) -> np.ndarray:
        """Return the maximum of all ranks' exponents; raise OptionError if they pass more than `count` terms, or rows.

        own: this rank's. passed: how many terms or rows this rank passes. Collective, in one message.
        """
        numbers = np.zeros(self.size, np.int32)
        numbers[self.rank] = passed  # the maximum of the bytes of all ranks' arrays holds every rank's number
        joined = np.concatenate([own, numbers.view(own.dtype)])
        self._combine(joined, "max")
        total = int(np.frombuffer(joined[own.size :].tobytes(), np.int32).sum(dtype=np.int64))
        if total > count:
            raise on_all_ranks(OptionError(f"count={count}: the ranks pass {total} {what}"), self.topology.world)
        return joined[: own.size]

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
        largest = self._largest(fixed_point.exponents(terms, layout, form, scratch), len(terms), count, "terms")
        special = fixed_point.special(terms, largest, layout, form)
        if special is not None:
            packed = special.packed()
            self._combine(packed, "max")
            special = special.unpacked(packed)
            largest[special.blocks] = special.exponents
        integers = self._from_inner(layout.length, form.carrier)
        fixed_point.add(terms, largest, count, layout, form, scratch, integers, finite=special is None)

        def finish_part(part: slice) -> None:
            fixed_point.finish(integers, largest, count, mean, layout, form, scratch, out, part)
            if special is not None:
                fixed_point.finish_special(special, out, part)

        self._finish_sums(integers, finish_part, out, scatters)

    def _finish_sums(self, wide: np.ndarray, finish: Callable[[slice], None], out: np.ndarray, scatters: bool) -> None:
        """Sum the array `wide` of all ranks; let `finish` write the result's elements in a slice to `out`. Collective.

        scatters: only the owned slice of `out` is needed.
        """
        if wide.nbytes >= ONE_CALL_BYTES or scatters:
            inner = self.inner.two_phase(out) if self.size > 1 else None
            if inner is not None:
                inner.phases.reduce_scatter(wide, ops.OPS["sum"])
                finish(inner.owned(out.size))
                if not scatters or inner is not self.inner:  # the one that "auto" selects may own other slices
                    inner.phases.all_gather(out)
                return
        self._combine(wide, "sum")
        finish(slice(0, out.size))

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

    def _route(self, call: Call) -> Work:
        extreme = self.size > 1 and call.length and call.dtype in FORMATS and call.op in ("max", "min")
        if not extreme:
            return super()._route(call)
        return self._reduce_gpu if call.memory == GPU else self._reduce

    def _locator_for(self, call: Call) -> Locate | None:
        return self._block_place if call.dtype in FORMATS else super()._locator_for(call)

    def _block_place(self, buffer: Any) -> Location | None:
        """Return the blocks of an array and its position, which must be equal on all ranks; also the position in memory
        that ranks share, where the inner backend writes results."""
        where, shared = self.registered.find(buffer), self._locate(buffer)
        if where is None:
            return shared
        number = self._layout(buffer.size, where).number
        return number if shared is None else zlib.crc32(
            f"{number} {shared}".encode()
        ), where.start * buffer.dtype.itemsize

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


KINDS = ("all_reduce", "reduce_scatter")  # of `sum_terms` and `sum_products`


def _check_terms(call: Call, op: Op, count: Any, terms: Any) -> None:
    """Raise the error if these can't be terms of a sum into an array. Local."""
    if call.dtype not in FORMATS or op.name not in ("sum", "mean") or len(call.shape or ()) != 1:
        raise UnsupportedOpError(
            f'sum_terms() is "sum" or "mean" of 1-D arrays of floats, not "{op.name}" of {call.dtype} of shape '
            f"{call.shape}"
        )
    _check_most(count, MOST_TERMS)
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


def _check_pairs(call: Call, op: Op, count: Any, pairs: Any) -> list[int]:
    """Raise the error if these can't be factors of products in an array. Returns the numbers of columns. Local."""
    if call.dtype != np.float32 or op.name not in ("sum", "mean") or len(call.shape or ()) != 1 or call.memory == GPU:
        raise UnsupportedOpError(
            f'sum_products() is "sum" or "mean" in a 1-D float32 array of NumPy, not "{op.name}" of {call.dtype} of '
            f"shape {call.shape}{' on a GPU' * (call.memory == GPU)}"
        )
    _check_most(count, products.MOST_ROWS)
    arrays = [each for pair in pairs for each in pair] if _are_pairs(pairs) else []
    sizes = [each.shape[1] for each in arrays]
    length = sum(inputs * outputs for inputs, outputs in zip(sizes[::2], sizes[1::2], strict=True))
    if not _are_pairs(pairs) or length != call.length:
        raise NotAnArrayError(
            "sum_products() takes pairs of float32 arrays (k, inputs) and (k, outputs), with one k, and `out` has "
            f"inputs x outputs elements for each pair; got {_shown(pairs)}, for {call.length} elements"
        )
    return sizes


def _are_pairs(given: Any) -> bool:
    """Return whether these are pairs of 2-D float32 arrays of one number of rows. Local."""
    if not isinstance(given, list | tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        return False
    arrays = [each for pair in given for each in pair]
    fits = all(isinstance(each, np.ndarray) and each.dtype == np.float32 and each.ndim == 2 for each in arrays)
    return fits and len({len(each) for each in arrays}) <= 1


def _shown(given: Any) -> str:
    """Return a description of arrays in tuples and lists, or of another object."""
    if isinstance(given, list | tuple):
        return f"[{', '.join(map(_shown, given))}]"
    return f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else type(given).__qualname__


def _check_most(count: Any, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 1 <= count <= most:
        raise OptionError(f"count must be an integer from 1 to {most}, got {count!r}")


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
