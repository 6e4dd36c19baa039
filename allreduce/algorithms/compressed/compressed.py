"""Compressed: base class of the algorithms that send floating-point arrays in another form, by an inner algorithm."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from allreduce import kernels
from allreduce.algorithm import Algorithm, Context, TwoPhase, Work
from allreduce.arrays.compression import LONG
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.parts import Part
from allreduce.call.call import Call
from allreduce.errors import UnavailableError
from allreduce.memory.allocations import Slice
from allreduce.transport.control import raise_together


class Compressed(TwoPhase):
    """An algorithm that sends arrays of some calls in another form, see `compresses`. `inner` does all other calls.

    inner: an algorithm on the same ranks, closed with this one. It allocates.
    """

    def __init__(self, context: Context, *, inner: Algorithm) -> None:
        super().__init__(context)
        self.inner, self.lossless, self.holds = inner, inner.lossless, [inner]
        self.sums, self.sums_half, self.by_array = inner.sums, inner.sums_half, inner.by_array
        self.copies_unregistered = inner.copies_unregistered
        self._scratch: dict[tuple[np.dtype, str], Any] = {}  # memory from the inner algorithm, by dtype and device

    # A subclass writes

    @abstractmethod
    def reduce_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        """Reduce a 1-D array for which `compresses` holds in place. There are at least 1 element and 2 ranks.

        op: finish results by `op.finish`: inside of another algorithm this one has fewer ranks than a mean divides by.
        where: `buffer` as a slice of an array with state, or None; on a GPU `buffer` is a copy of this slice. parts: of
        the model, inside of `buffer`; one part with the shape of the caller's array where no parts are known. All ranks
        end with the same bits.
        """

    def scatter_parts(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        """As `reduce_parts`, but only this rank's `owned` slice of the result is needed."""
        self.reduce_parts(buffer, op, where, parts)

    def compresses(self, dtype: np.dtype, op: Op) -> bool:
        """Return whether arrays of `dtype` are sent in another form in reductions by `op`. Local."""
        return self.size > 1 and dtype in LONG and op.adds

    def find(self, buffer: Any) -> Slice | None:
        """Return `buffer` as a slice of an array with state, or None. Local."""
        return self.context.allocations.find(buffer)

    # The methods of an algorithm

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self.inner.owned(length, rank)

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return self.inner.allocate(length, dtype, device)

    def resolve(self, op: str, dtype: np.dtype) -> Op:
        return self.inner.resolve(op, dtype)

    def choice(self, call: Call) -> tuple[str, str]:
        return self.inner.choice(call)

    def place(self, buffer: Any) -> tuple[int, int] | None:
        """Return the place of an array, which the ranks compare: its state decides which messages are sent. Local."""
        return self.context.allocations.place(buffer)

    def work(self, call: Call, op: Op) -> Work:
        if call.kind == "all_gather" or not self.compresses(call.dtype, op):
            if call.kind != "reduce_scatter" or self.inner.two_phase:
                return self.inner.work(call, op)
            return super().work(call, op)
        shape = call.shape or (call.length,)
        whole = [Part("", 0, shape if call.layout == "C" else shape[::-1])]
        reduce = self.scatter_parts if call.kind == "reduce_scatter" else self.reduce_parts

        def run(buffer: Any) -> None:
            where = self.find(buffer)
            parts = (where.parts if where else []) or whole
            if call.memory == GPU:
                everything = slice(None)
                self.context.stage(buffer, everything, lambda host: reduce(host, op, where, parts), everything)
            else:
                reduce(buffer, op, where, parts)

        return Work(run, place=self.place)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        if not self.compresses(buffer.dtype, op):
            self.inner.reduce(buffer, op)
            return
        where = self.find(buffer)
        self.reduce_parts(buffer, op, where, (where.parts if where else []) or [Part("", 0, buffer.shape)])

    def reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        if isinstance(self.inner, TwoPhase) and not self.compresses(buffer.dtype, op):
            self.inner.reduce_scatter(buffer, op)
        else:
            self.reduce(buffer, op)

    scatter = reduce_scatter

    def all_gather(self, buffer: np.ndarray) -> None:
        self.inner.all_gather(buffer)

    def close(self) -> None:
        self._scratch.clear()
        super().close()

    # For subclasses

    def check_kernels(self, given: str) -> None:
        """Raise UnavailableError on all ranks if one of them has no C library. Collective. given: what needs it."""
        remedy = "install a C compiler, then allreduce again (pip install -e .)"
        text = f"{given} needs the C library, and arrays are computed by {kernels.status()}: {remedy}"
        raise_together(self.comm, None if kernels.status() == "C" else UnavailableError(text))

    def from_inner(self, length: int, dtype: np.dtype, device: str = "cpu") -> Any:
        """Return scratch memory from the inner algorithm, 1-D. A later call gets the same. Collective when it grows."""
        held = self._scratch.get((dtype, device))
        if held is None or held.size < length:
            held = self._scratch[dtype, device] = self.inner.allocate(length, dtype, device)
        return held[:length]
