"""Traced: a backend whose calls are recorded: when this rank came, when they ended, what they reduced and how.

For who waited for whom nothing is exchanged in a call: ranks know a call by its number, and compare the times at
which they came to it when the trace is written.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from allreduce.arrays import trees
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.tracing import trace as tracing
from allreduce.tracing.trace import Trace, now
from allreduce.wrappers.wrapper import Wrapper


class Traced(Wrapper):
    """Records the calls of a backend in a trace. Creating it is collective, as every use.

    trace: a Trace, which its owner closes, or the path of a file, which is written when this is closed.
    owns_inner: whether `close` closes the backend too.

    A call on a GPU's arrays may end before the GPU is done (NCCL); what is recorded is what the host spent on it.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        inner: AllReduce,
        trace: str | os.PathLike[str] | Trace,
        owns_inner: bool = False,
    ) -> None:
        self.trace, self._owns_trace = tracing.of(trace, topology)  # first: it may be refused
        super().__init__(topology, inner=inner, owns_inner=owns_inner)
        self.calls = self.trace.series(inner.name)
        self._chooses = type(inner).chosen is not AllReduce.chosen  # by the memory of an array, too
        self._shown: dict[tuple, tuple[str, dict[str, Any]]] = {}

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        if self._shut:
            self.check_open()
        if isinstance(buffer, trees.KINDS):  # what is recorded are its buffers
            self.reduce_tree(buffer, op)
            return
        begin = now()
        self.inner(buffer, op)
        self._note("all_reduce", buffer, begin, op)

    def bind(self, array: Any, op: str = "mean") -> Callable[[], None]:
        inner = super().bind(array, op)

        def bound() -> None:
            begin = now()
            inner()
            self._note("all_reduce", array, begin, op)

        return bound

    def reduce_scatter(self, buffer: np.ndarray, op: str = "mean") -> np.ndarray:
        return self._recorded("reduce_scatter", partial(super().reduce_scatter, buffer, op), buffer, op)

    def all_gather(self, buffer: np.ndarray) -> None:
        self._recorded("all_gather", partial(super().all_gather, buffer), buffer)

    def broadcast(self, array: Any, root: int = 0) -> None:
        if isinstance(array, trees.KINDS):
            AllReduce.broadcast(self, array, root)
        else:
            self._recorded("broadcast", partial(super().broadcast, array, root), array)

    def stack(self, array: Any) -> Any:
        if isinstance(array, trees.KINDS):
            return AllReduce.stack(self, array)
        return self._recorded("stack", partial(super().stack, array))

    def sparse(self, indices: Any, values: Any, rows: int, op: str = "mean") -> tuple[Any, Any]:
        begin = now()
        result = super().sparse(indices, values, rows, op)
        self._note("sparse", result[1], begin, op)
        return result

    def _recorded(self, kind: str, work: Callable[[], Any], array: Any = None, op: str = "") -> Any:
        """What `work` returns; its array, when none is given."""
        begin = now()
        result = work()
        self._note(kind, result if array is None else array, begin, op)
        return result

    def _note(self, call: str, array: Any, begin: int, op: str = "") -> None:
        key: tuple = call, op, array.nbytes, array.dtype.num
        if self._chooses and type(array) is np.ndarray:
            key = *key, self.inner.hooks.memory(array)
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = self._describe(call, array, op)
        self.calls.note(shown[0], begin, shown[1])

    def _describe(self, call: str, array: Any, op: str) -> tuple[str, dict[str, Any]]:
        backend = self.inner.chosen(array) if call == "all_reduce" else self.inner.name
        about: dict[str, Any] = {"bytes": int(array.nbytes), "dtype": str(array.dtype), "backend": backend}
        return f"{call}, {backend}", {**about, "op": op} if op else about

    def _close(self) -> None:
        if self._owns_trace:
            self.trace.close()

    def abandon(self) -> None:
        super().abandon()
        if self._owns_trace:
            self.trace.abandon()
