"""Compressed: base class of backends that send floating-point arrays in another form, through an inner backend."""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce import notices
from allreduce.arrays.gpu import is_gpu_array
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part, Registry, Slice
from allreduce.backend import AllReduce, TwoPhase
from allreduce.engine.call import Call
from allreduce.engine.engine import Locate, Work
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.transport.shared_segment import Location
from allreduce.wrappers.options import LONG

NOTICED = 1024  # elements: shorter arrays of one dimension are not worth a notice


class Compressed(TwoPhase):
    """A backend whose sums of float32 and float64 arrays are sent in another form; all other calls are `inner`'s.

    inner: a backend on the same topology, closed with this one. Memory from `allocate` is the inner backend's.
    owns_inner: False: its owner closes it.

    `broadcast`, `stack`, `all_gather` and `sparse`, other dtypes, and other operations than sum and mean are not
    compressed. With one rank nothing is. Use `exact`, the inner backend, for values that must not be rounded.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce, check: str = "first", owns_inner: bool = True) -> None:
        self.inner, self._owns_inner = inner, owns_inner
        self._scratch: dict[tuple[np.dtype, str], Any] = {}  # memory from the inner backend, by dtype and device
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        inner = self.inner
        if self._owns_inner:
            self._add_part(inner)
        self.name = inner.name
        self.sums, self.sums_half, self.by_array = inner.sums, inner.sums_half, inner.by_array
        self._owners = inner.hooks.owners
        self.registered = Registry()

    # A subclass writes

    @abstractmethod
    def _reduce_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        """Reduce a 1-D float32 or float64 array in place, in another form, by sum or mean. Collective.

        There are at least 1 element and 2 ranks. op: finish results by `op.finish`: as a part of another backend this
        one has fewer ranks than a mean divides by. where: the slice of a registered array that `buffer` is (on a GPU:
        that `buffer` is a copy of), or None. parts: of the model, inside of `buffer`; one part with the shape of the
        caller's array where no parts are known. All ranks end with the same bits.
        """

    def _scatter_compressed(self, buffer: np.ndarray, op: Op, where: Slice | None, parts: Sequence[Part]) -> None:
        """As `_reduce_compressed`, but only this rank's `owned` slice of the result is needed."""
        self._reduce_compressed(buffer, op, where, parts)

    def _compresses(self, dtype: np.dtype, op: str) -> bool:
        """Return whether arrays of `dtype` are compressed in reductions by `op`. Local."""
        return self.size > 1 and dtype in LONG and op in ("sum", "mean")

    def reduce_parts(self, buffer: np.ndarray, op: Op, parts: Sequence[Part], begin: int | None) -> None:
        """Reduce a 1-D array, which holds `parts`, as a part of another backend's call. Collective.

        begin: the address of the array that `buffer` is a copy of (on a GPU); None: of `buffer` itself.
        """
        self._reduce_compressed(buffer, op, self.registered.find(buffer, begin), parts)

    def _say_undescribed(self, needs: str) -> None:
        """Log once that an array is not compressed because `describe` has told nothing of it. Local."""
        notices.once(
            self.rank,
            f"compress={needs}, so arrays of one dimension are sent uncompressed: call describe(array, parts) with the "
            "parameters of the model; of PyTorch's DDP, allreduce.torch_backend.describe(model)",
        )

    def _from_inner(self, length: int, dtype: np.dtype, device: str = "cpu") -> Any:
        """Return scratch memory from the inner backend, 1-D. A later call gets the same. Collective when it grows."""
        held = self._scratch.get((dtype, device))
        if held is None or held.size < length:
            held = self._scratch[dtype, device] = self.inner.hooks.allocate(length, dtype, device)
        return held[:length]

    # What users call

    @property
    def exact(self) -> AllReduce:
        return self.inner.exact

    def describe(self, array: Any, parts: Sequence[Part] = (), whole: bool = True) -> None:
        self.registered.register(array, parts)
        super().describe(array, parts, whole)

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        return {**self.registered.state(array), **super().state(array)}

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        own = {name: held for name, held in state.items() if name[:1].isdigit()}
        self.registered.check_state(own, array)
        super().load_state({name: held for name, held in state.items() if name not in own}, array)
        self.registered.load_state(own, array)

    def reset(self, array: Any = None) -> None:
        self.registered.reset(array)
        super().reset(array)

    def hand_over(self, buffer: np.ndarray, kept: slice) -> None:
        where = self.registered.find(buffer)
        if where is None or kept == slice(0, where.length):  # then this rank's own call with the array settles it
            return
        if where.settle():
            where.hand_over(buffer, kept)

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self.inner.owned(length, rank)

    def chosen(self, array: Any) -> str:
        return self.inner.chosen(array)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    # Hooks of AllReduce and TwoPhase

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        array = self.inner.hooks.allocate(length, dtype, device)
        self._owners = self.inner.hooks.owners  # "auto" has others after its first allocation
        return array

    def _memory(self, buffer: np.ndarray) -> int:
        return self.inner.hooks.memory(buffer)

    def _locate(self, buffer: np.ndarray) -> Location | None:
        return None if is_gpu_array(buffer) else self.inner.hooks.locate(buffer)

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        return self.inner.hooks.resolve(op, dtype)

    def _route(self, call: Call) -> Work:
        if not call.length or not self._compresses(call.dtype, call.op):
            return self.inner.hooks.route(call)
        return self._working(call, self._reduce_compressed)

    def _locator_for(self, call: Call) -> Locate | None:
        return self._place if self._compresses(call.dtype, call.op) else self.inner.hooks.locator_for(call)

    def _place(self, buffer: Any) -> Location | None:
        """Return a number for the registered array that `buffer` is in, and for its parts; and the position there.

        The state that is kept for an array decides which messages are sent, so the ranks compare the array. Of
        other arrays they compare the place in memory that ranks share.
        """
        where = self.registered.find(buffer)
        if where is None:
            return self._locate(buffer)
        parts = zlib.crc32(repr(where.entry.parts).encode())
        return (where.entry.number << 32) + parts, where.start * buffer.dtype.itemsize

    def _scatter_work_for(self, call: Call) -> Work:
        if not call.length or not self._compresses(call.dtype, call.op):
            return super()._scatter_work_for(call)
        return self._working(call, self._scatter_compressed)

    def _working(self, call: Call, reduce: Callable[[np.ndarray, Op, Slice | None, Sequence[Part]], None]) -> Work:
        """Return the function that does `reduce` for arrays of a call's shape and memory."""
        shape = call.shape or (call.length,)
        whole = [Part("", 0, shape if call.layout == "C" else shape[::-1])]

        def work(buffer: Any, op: Op) -> None:
            where = self.registered.find(buffer)
            parts = (where.parts if where else []) or whole
            if call.memory == GPU:
                everything = slice(None)
                self._stage(buffer, everything, lambda host: reduce(host, op, where, parts), everything)
            else:
                reduce(buffer, op, where, parts)

        return work

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        if self._compresses(buffer.dtype, op.name):
            where = self.registered.find(buffer)
            parts = (where.parts if where else []) or [Part("", 0, buffer.shape)]
            self._reduce_compressed(buffer, op, where, parts)
        else:
            self.inner.hooks.reduce(buffer, op)

    def _scatter_rounded(self, buffer: np.ndarray, op: Op) -> None:
        if self._compresses(buffer.dtype, op.name):
            self._reduce(buffer, op)
        else:
            super()._scatter_rounded(buffer, op)

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        if isinstance(self.inner, TwoPhase):
            self.inner.phases.reduce_scatter(buffer, op)
        else:
            self.inner.hooks.reduce(buffer, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        if isinstance(self.inner, TwoPhase):
            self.inner.phases.all_gather(buffer)
        else:
            self._spread_owned(buffer)

    def _forget(self) -> None:
        super()._forget()
        self._scratch.clear()

    def abandon(self) -> None:
        free_later((self.registered, self._scratch))  # late ranks may still write there
        self._scratch = {}
        super().abandon()
