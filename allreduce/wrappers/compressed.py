"""Compressed: float32 and float64 travel as 16-bit floats, so a slow network carries half the bytes, or a quarter."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, trees
from allreduce.arrays.gpu import Turns, is_gpu_array
from allreduce.arrays.memory_kinds import FOREIGN, GPU
from allreduce.backend import AllReduce
from allreduce.engine import call as records
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.transport.deferred_free import free_later
from allreduce.wrappers.wrapper import Wrapper

SHORT = ("float16", "bfloat16")
LONG = (np.dtype(np.float32), np.dtype(np.float64))


def parse(compress: object, sums_half: bool, name: str) -> np.dtype:
    """The dtype that `compress` names, or the OptionError that says why the backend `name` can't take it."""
    if not isinstance(compress, str) or compress not in SHORT:
        raise OptionError(f'compress={compress!r} is unknown; use "float16", "bfloat16" or None')
    if not sums_half:
        raise OptionError(
            f'compress={compress!r}: {name!r} sums no 16-bit floats; use "auto", "ring" or another backend that does'
        )
    return dtypes.parse(compress)


class Compressed(Wrapper):
    """Rounds what is reduced to 16 bits on the way there, and gives it back in the dtype that it came in.

    compress: "bfloat16", with the range of float32 and 8 binary digits, or "float16", with 11 digits and nothing above
        65504: what is larger, also a sum that is, arrives as infinity.

    Of float32 and float64 only, in calls and `reduce_scatter`; integers, truth values and 16-bit floats travel as they
    are. Each rank's values are rounded once, the sum (or mean) is formed in float32 and rounded once more, for all
    ranks alike. What must be exact is not for it: `exact` is the backend inside. `broadcast`, `stack`, `all_gather`
    and `sparse`, with which parameters go from rank to rank, lose nothing. A single rank sends nothing, and rounds
    nothing.

    It costs two passes over the array and memory of half its size, so it pays where bytes are slow: across nodes,
    not in the memory that the ranks of a node share. The memory is the inner backend's, kept, and grown where needed.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce, compress: str, owns_inner: bool = False) -> None:
        self.compress = parse(compress, inner.sums_half, inner.name)
        super().__init__(topology, inner=inner, owns_inner=owns_inner)
        self._shorts: dict[bool, Any] = {}  # the memory for 16-bit floats; True: on the GPU
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"Compressed({self.inner!r}, {self.compress})"

    @property
    def exact(self) -> AllReduce:
        return self.inner.exact

    def sent(self, dtype: np.dtype) -> np.dtype:
        return self.compress if self.size > 1 and dtype in LONG else self.inner.sent(dtype)

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        if self._shut:
            self.check_open()
        if isinstance(buffer, trees.KINDS):
            self.reduce_tree(buffer, op)
        elif self._agrees(buffer, op, "all_reduce"):
            array = np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer  # no subclass of it
            flat = array.reshape(-1, order="A")
            with self._turn(flat):
                short = self._rounded(flat)
                with _overflowing():
                    self.inner(short.reshape(array.shape, order="C" if array.flags.c_contiguous else "F"), op)
                    flat[...] = short
        else:
            self.inner(buffer, op)

    def bind(self, array: Any, op: str = "mean") -> Callable[[], None]:
        self._agrees(array, op, "all_reduce")
        return partial(self, array, op)

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """As the inner backend's; the rest of `buffer` stays as it is. Raises OptionError where that is no TwoPhase."""
        self._check_phases()
        if not self._agrees(buffer, op, "reduce_scatter"):
            return super().reduce_scatter(buffer, op)
        mine = buffer[self.owned(buffer.size)]
        with self._turn(buffer):
            short = self._rounded(buffer)
            with _overflowing():
                mine[...] = super().reduce_scatter(short, op)
        return mine

    def _turn(self, flat: Any) -> AbstractContextManager[None]:
        """Inside, the memory for 16-bit floats is this call's."""
        return self._turns.taken() if is_gpu_array(flat) else nullcontext()

    def _agrees(self, buffer: Any, op: str, kind: str) -> bool:
        """Whether an array travels as 16 bits; then all ranks have been seen to bring the same. Collective.

        What can't be reduced is for the inner backend to refuse.
        """
        dtype = getattr(buffer, "dtype", None)
        if self.size == 1 or not isinstance(dtype, np.dtype) or dtype not in LONG or not buffer.size:  # None == float64
            return False
        self.check_open()
        try:
            memory = GPU if is_gpu_array(buffer) else FOREIGN
            record = records.of_array(kind, buffer, op, memory)
            resolved = self._resolve(op, record.dtype)
        except AllReduceError:
            return False
        text = f"{record}, sent as {self.compress}"
        values = [*records.row(record, resolved.code), dtypes.TYPES[self.compress].code]
        self._engine.agree_once(text, text, values, None)
        return True

    def _rounded(self, flat: Any) -> Any:
        """A 1-D array as 16-bit floats, in memory of the inner backend's. Collective where that has to grow."""
        on_gpu = is_gpu_array(flat)
        held = self._shorts.get(on_gpu)
        if held is None or held.size < flat.size:
            device = "cuda" if on_gpu else "cpu"
            held = self._shorts[on_gpu] = self.inner.allocate(flat.size, self.compress, device)
        short = held[: flat.size]
        with _overflowing():
            short[...] = flat
        return short

    def _close(self) -> None:
        self._shorts.clear()

    def abandon(self) -> None:
        free_later(self._shorts)  # late ranks may still write there
        self._shorts = {}
        super().abandon()


def _overflowing() -> np.errstate:
    """What is too large becomes infinity, in silence; it may be so on one rank alone."""
    return np.errstate(all="ignore")
