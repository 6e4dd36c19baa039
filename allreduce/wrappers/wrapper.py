"""Wrapper: a backend around a backend. What it does not change, the inner one does."""

from typing import Any

import numpy as np

from allreduce.arrays.ops import Op
from allreduce.arrays.signature import Signature
from allreduce.base import AllReduce, Reduction
from allreduce.topology import Topology


class Wrapper(AllReduce):
    """Forwards everything to `inner`, which stays its owner's, who closes it after the wrapper.

    What an inner backend offers beyond a backend's methods (the phases of a TwoPhase, `choice` of "auto") is
    found here too.
    """

    def __init__(self, topology: Topology, *, inner: AllReduce, check: str = "never") -> None:
        super().__init__(topology, check=check)  # the inner backend checks
        self.inner = inner
        self.name = inner.name
        self.sums_half, self.copies_foreign = inner.sums_half, inner.copies_foreign

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def owned(self, length: int, rank: int | None = None) -> slice:
        return self.inner.owned(length, rank)

    def all_gather(self, buffer: np.ndarray) -> None:
        self.inner.all_gather(buffer)

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return self.inner._allocate(length, dtype, device)

    def _memory(self, buffer: Any) -> int:
        return self.inner._memory(buffer)

    def _route(self, signature: Signature) -> Reduction:
        return self.inner._route(signature)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self.inner._reduce(buffer, op)

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        self.inner._reduce_gpu(buffer, op)
