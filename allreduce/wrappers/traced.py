"""Traced: records each call of a backend: start, end, bytes, dtype, operation and backend.

Calls exchange no extra messages. When the trace is written, calls are matched by sequence number; their start times
show which rank was last.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.arrays import trees
from allreduce.backend import AllReduce
from allreduce.topology import Topology
from allreduce.tracing import trace as tracing
from allreduce.tracing.trace import Trace, now
from allreduce.wrappers.wrapper import Wrapper


class Traced(Wrapper):
    """Records the calls of a backend in a trace. The constructor is collective if `trace` is a path.

    trace: a Trace, which its owner closes, or the path of a file, which is written when this is closed. owns_inner:
    whether `close` closes the backend too.

    For GPU arrays the recorded time is the host's; the GPU may finish later (NCCL).
    """

    def __init__(
        self,
        topology: Topology,
        *,
        inner: AllReduce,
        trace: str | os.PathLike[str] | Trace,
        owns_inner: bool = False,
    ) -> None:
        self.trace, self._owns_trace = tracing.of(trace, topology)  # first, because it may raise
        super().__init__(topology, inner=inner, owns_inner=owns_inner)
        self.calls = self.trace.series(inner.name)
        # True: the selected backend may also depend on the array's memory
        self._chooses = type(inner).chosen is not AllReduce.chosen
        self._descriptions: dict[tuple, tuple[str, dict[str, Any]]] = {}
        self._changes = 0  # of the selected backends, when the descriptions were made

    # A call with a tree is recorded as the calls on its buffers

    def __call__(self, buffer: Any, op: str = "mean") -> None:
        if isinstance(buffer, trees.KINDS):
            self.check_open()
            self.reduce_tree(buffer, op)
            return
        if self._closed:
            self.check_open()
        begin = now()
        self.inner(buffer, op)
        self._record("all_reduce", buffer, begin, op)

    def broadcast(self, array: Any, root: int = 0) -> None:
        (AllReduce if isinstance(array, trees.KINDS) else Wrapper).broadcast(self, array, root)

    def stack(self, array: Any) -> Any:
        return (AllReduce if isinstance(array, trees.KINDS) else Wrapper).stack(self, array)

    on_arrays = AllReduce.on_arrays

    def around(self, kind: str, call: Callable[[], Any], array: Any = None, op: str = "") -> Any:
        begin = now()
        result = super().around(kind, call)
        if kind not in ("allocate", "bind"):
            shown = result[1] if kind == "sparse" else array
            self._record(kind, result if kind == "stack" else shown, begin, op)
        return result

    def _record(self, call: str, array: Any, begin: int, op: str = "") -> None:
        key: tuple = call, op, array.nbytes, array.dtype.num
        if self._chooses and type(array) is np.ndarray:
            key = *key, self.inner.hooks.memory(array)
            if self._changes != (changes := getattr(self.inner, "changes", 0)):
                self._changes = changes
                self._descriptions.clear()
        shown = self._descriptions.get(key)
        if shown is None:
            shown = self._descriptions[key] = self._describe(call, array, op)
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
