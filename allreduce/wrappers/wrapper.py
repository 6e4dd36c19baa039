"""Wrapper: a backend around a backend. What it does not change, the inner one does."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce.arrays.ops import Op
from allreduce.backend import AllReduce, Hooks, Phases, TwoPhase
from allreduce.errors import ClosedError, OptionError
from allreduce.topology import Topology


class Wrapper(AllReduce):
    """Forwards everything to `inner`, which stays its owner's, who closes it after the wrapper.

    owns_inner: closing the wrapper closes the inner backend too.

    Checks, communicators, memory and tags are the inner backend's, so making a wrapper is local and cheap. What
    an inner backend offers beyond a backend's methods is found here too: the phases of a TwoPhase (a wrapper of
    one is a TwoPhase itself), `choice` of "auto".
    """

    def __new__(cls, topology: Topology, *, inner: AllReduce, **options: Any) -> "Wrapper":
        kind = _two_phase(cls) if isinstance(inner, TwoPhase) and not issubclass(cls, TwoPhase) else cls
        return object.__new__(kind)

    def __init__(self, topology: Topology, *, inner: AllReduce, owns_inner: bool = False) -> None:
        self.inner = inner  # first: attributes that are not here are looked up in it
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self.name = inner.name
        self.sums, self.sums_half, self.copies_foreign = inner.sums, inner.sums_half, inner.copies_foreign
        self.by_array = inner.by_array
        self._shut = self.owns_topology = False
        self._owns_inner = owns_inner
        if owns_inner:
            topology.use(self)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self._shut or self.inner.closed

    @property
    def exact(self) -> AllReduce:
        inner = self.inner.exact
        return self if inner is self.inner else inner

    @property
    def part_of(self) -> AllReduce | None:
        """The inner backend asks whose part it is: for its tags, and for what it tells of copies."""
        return self.inner.part_of

    @part_of.setter
    def part_of(self, whole: AllReduce | None) -> None:
        self.inner.part_of = whole

    def sent(self, dtype: np.dtype) -> np.dtype:
        return self.inner.sent(dtype)

    # What users call

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        self.check_open()
        return self.inner.allocate(length, dtype, device)

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        if self._shut:
            self.check_open()
        self.inner(buffer, op)

    def bind(self, array: Any, op: str = "mean") -> Callable[[], None]:
        self.check_open()
        inner = self.inner.bind(array, op)

        def bound() -> None:
            if self._shut:
                self.check_open()
            inner()

        return bound

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        """As the inner backend's. Raises OptionError, before anything is sent, where that is no TwoPhase."""
        self._check_phases()
        return self.inner.reduce_scatter(buffer, op)  # type: ignore[attr-defined]

    def all_gather(self, buffer: np.ndarray) -> None:
        self.check_open()
        self.inner.all_gather(buffer)

    def broadcast(self, array: Any, root: int = 0) -> None:
        self.check_open()
        self.inner.broadcast(array, root)

    def stack(self, array: Any) -> Any:
        self.check_open()
        return self.inner.stack(array)

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        self.check_open()
        return self.inner.sparse(indices, values, rows, op)

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self.inner.owned(length, rank)

    def chosen(self, array: Any) -> str:
        return self.inner.chosen(array)

    def close(self) -> None:
        """Give back what the wrapper has of its own. Collective; closing twice does nothing."""
        if self._shut:
            return
        self._shut = True
        self._close()
        if self._owns_inner:
            self.topology.let_go(self)
            self.inner.close()
        if self.owns_topology:
            self.topology.close()

    def abandon(self) -> None:
        """Let go of what the wrapper has of its own. Local; an inner backend of another owner stays as it is."""
        self._shut = True
        if self._owns_inner:
            self.inner.abandon()

    # What a backend of several parts calls in those parts

    def check_open(self) -> None:
        if self._shut:
            raise ClosedError(f"this {type(self).__name__} of {self.name} is closed; make it again to go on")
        self.inner.check_open()

    def _check_phases(self) -> None:
        self.check_open()
        if not isinstance(self.inner, TwoPhase):
            raise OptionError(f'{self.name!r} has no reduce_scatter; use a backend that has the two phases, "ring" say')

    # What AllReduce, or TwoPhase, asks of every backend

    @property
    def hooks(self) -> Hooks:
        return self.inner.hooks

    @property
    def phases(self) -> Phases:
        return self.inner.phases  # type: ignore[attr-defined]

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        return self.hooks.resolve(op, dtype)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self.hooks.reduce(buffer, op)

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self.phases.reduce_scatter(buffer, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        self.phases.all_gather(buffer)


@functools.cache
def _two_phase(kind: type[Wrapper]) -> type[Wrapper]:
    """A kind of wrapper that is a TwoPhase too, as a sharded update asks; its methods are the wrapper's."""
    return type(kind.__name__, (kind, TwoPhase), {"__module__": kind.__module__, "__doc__": kind.__doc__})
