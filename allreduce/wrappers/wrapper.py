"""Wrapper: base class of backends that forward all calls to an inner backend, and do something around them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from allreduce.arrays.ops import Op
from allreduce.arrays.registered import Part
from allreduce.arrays.trees import Group
from allreduce.backend import AllReduce, Hooks, NodeArrays, Phases, TwoPhase
from allreduce.errors import ClosedError
from allreduce.topology import Topology

METHODS = {"all_reduce": "__call__", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}  # by kind


class Wrapper(AllReduce):
    """Forwards all methods to `inner`.

    owns_inner: True: closing the wrapper closes `inner`. False: the owner of `inner` closes it, after the wrapper.

    The wrapper has no communicator or memory of its own, so the constructor is local and cheap. Other attributes of
    `inner` are available on the wrapper (`choice` of "auto"); a wrapper of a TwoPhase is a TwoPhase.
    """

    def __new__(cls, topology: Topology, *, inner: AllReduce, **options: Any) -> "Wrapper":
        kind = _two_phase(cls) if isinstance(inner, TwoPhase) and not issubclass(cls, TwoPhase) else cls
        return object.__new__(kind)

    def __init__(self, topology: Topology, *, inner: AllReduce, owns_inner: bool = False) -> None:
        self.inner = inner  # first: missing attributes are looked up in it
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self.name = inner.name
        self.sums, self.sums_half, self.copies_unregistered = inner.sums, inner.sums_half, inner.copies_unregistered
        self.by_array = inner.by_array
        self._closed = self.owns_topology = False
        self._owns_inner = owns_inner
        if owns_inner:
            topology.register(self)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.inner, name)
        return functools.partial(self._sum, name, found) if name in ("sum_terms", "sum_products") else found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def closed(self) -> bool:  # type: ignore[override]
        return self._closed or self.inner.closed

    @property
    def exact(self) -> AllReduce:
        inner = self.inner.exact
        return self if inner is self.inner else inner

    @property
    def part_of(self) -> AllReduce | None:
        """The inner backend's `part_of`, which decides its message tags and its notices."""
        return self.inner.part_of

    @part_of.setter
    def part_of(self, whole: AllReduce | None) -> None:
        self.inner.part_of = whole

    def node_arrays(self, buffer: np.ndarray) -> NodeArrays | None:
        return self.inner.node_arrays(buffer)

    def two_phase(self, buffer: np.ndarray) -> TwoPhase | None:
        return self.inner.two_phase(buffer)

    def sent(self, dtype: np.dtype) -> np.dtype:
        return self.inner.sent(dtype)

    # What users call

    def around(self, kind: str, call: Callable[[], Any], array: Any = None, op: str = "") -> Any:
        """Run `call`, a call of the inner backend, and return its result. All collective methods below call this.

        kind: the name of the call's method; "all_reduce" for `__call__`. array, op: arguments of the call, or none.
        """
        if self._closed:
            self.check_open()
        return call()

    def allocate(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        return self.around("allocate", lambda: self.inner.allocate(length, dtype, device))

    def allocate_scratch(self, length: int, dtype: DTypeLike = "float32", device: str | None = None) -> Any:
        return self.around("allocate", lambda: self.inner.allocate_scratch(length, dtype, device))

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        self.around("all_reduce", functools.partial(self.inner, buffer, op), buffer, op)

    def bind(self, array: Any, op: str = "mean", kind: str = "all_reduce") -> Callable[[], None]:
        method = METHODS.get(kind, "")  # "": an unknown kind, which the inner backend refuses
        for each in type(self).__mro__:
            if each is Wrapper or {"bind", "around"} & vars(each).keys():
                break
            if method in vars(each):  # the wrapper overrides this call
                return functools.partial(getattr(self, method), array, *([] if kind == "all_gather" else [op]))
        bound = self.around("bind", lambda: self.inner.bind(array, op, kind), array)
        return functools.partial(self.around, kind, bound, array, "" if kind == "all_gather" else op)

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        return self.around("reduce_scatter", lambda: self.inner.reduce_scatter(buffer, op), buffer, op)

    def all_gather(self, buffer: np.ndarray) -> None:
        self.around("all_gather", lambda: self.inner.all_gather(buffer), buffer)

    def broadcast(self, array: Any, root: int = 0) -> None:
        self.around("broadcast", lambda: self.inner.broadcast(array, root), array)

    def stack(self, array: Any) -> Any:
        return self.around("stack", lambda: self.inner.stack(array), array)

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        return self.around("sparse", lambda: self.inner.sparse(indices, values, rows, op), values, op)

    def _sum(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Run `sum_terms` or `sum_products`, its name, of an inner backend with exact=True."""
        by_name = dict(zip(("", "out", "op"), given, strict=False)) | named
        run = functools.partial(call, *given, **named)
        return self.around(name, run, by_name.get("out"), by_name.get("op", "sum"))

    def on_arrays(
        self, kind: str, structure: str, arrays: Sequence[Any], op: str = "sum", root: int = 0, changes: bool = False
    ) -> list[Any]:
        return self.around(kind, lambda: self.inner.on_arrays(kind, structure, arrays, op, root, changes))

    def describe(self, array: Any, parts: Sequence[Part] = (), whole: bool = True) -> None:
        self.inner.describe(array, parts, whole)

    def state(self, array: Any = None) -> dict[str, np.ndarray]:
        return self.inner.state(array)

    def load_state(self, state: Mapping[str, np.ndarray], array: Any = None) -> None:
        self.inner.load_state(state, array)

    def reset(self, array: Any = None) -> None:
        self.inner.reset(array)

    def hand_over(self, buffer: np.ndarray, kept: slice) -> None:
        self.inner.hand_over(buffer, kept)

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self.inner.owned(length, rank)

    def chosen(self, array: Any) -> str:
        return self.inner.chosen(array)

    def close(self) -> None:
        """Free the wrapper's own resources, and close `inner` if owns_inner. Collective; closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._close()
        if self._owns_inner:
            self.topology.unregister(self)
            self.inner.close()
        if self.owns_topology:
            self.topology.close()

    def abandon(self) -> None:
        """Drop the wrapper's own resources, and abandon `inner` if owns_inner. Local."""
        self._closed = True
        if self._owns_inner:
            self.inner.abandon()

    # Checks

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} of {self.name} is closed; create a new one")
        self.inner.check_open()

    # Hooks of AllReduce and TwoPhase

    @property
    def hooks(self) -> Hooks:
        return self.inner.hooks

    @property
    def phases(self) -> Phases:
        return self.inner.phases  # type: ignore[attr-defined]

    def _resolve(self, op: str, dtype: np.dtype) -> Op:
        return self.hooks.resolve(op, dtype)

    def _tree_buffer(self, group: Group) -> Any:
        return self.hooks.tree_buffer(group)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self.hooks.reduce(buffer, op)

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        self.phases.reduce_scatter(buffer, op)

    def _all_gather(self, buffer: np.ndarray) -> None:
        self.phases.all_gather(buffer)


@functools.cache
def _two_phase(kind: type[Wrapper]) -> type[Wrapper]:
    """Return a subclass of a wrapper class that is also a TwoPhase; the wrapper's methods come first."""
    return type(kind.__name__, (kind, TwoPhase), {"__module__": kind.__module__, "__doc__": kind.__doc__})
