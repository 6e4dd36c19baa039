"""A CuPy for machines without a GPU: what `allreduce` uses of it, on arrays that NumPy must not touch.

"Device" memory can't be reached but by `get` and `set`, as on a GPU; the counters tell who went that way.
"""

import sys
import types
from typing import Any

import numpy as np
import pytest


class Counters:
    def __init__(self) -> None:
        self.synchronized = self.pinned_bytes = self.to_host = self.to_device = 0


def make() -> types.ModuleType:
    """A module to put into sys.modules as "cupy"; its `counters` are its own."""
    cupy = types.ModuleType("cupy")
    counters = Counters()

    class ndarray:  # noqa: N801, CuPy's name
        def __init__(self, data: np.ndarray) -> None:
            self._data = data

        shape = property(lambda self: self._data.shape)
        strides = property(lambda self: self._data.strides)
        ndim = property(lambda self: self._data.ndim)
        size = property(lambda self: self._data.size)
        dtype = property(lambda self: self._data.dtype)
        itemsize = property(lambda self: self._data.itemsize)
        nbytes = property(lambda self: self._data.nbytes)

        @property
        def flags(self) -> types.SimpleNamespace:  # CuPy's has no more than these
            flags = self._data.flags
            return types.SimpleNamespace(
                c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=flags.owndata
            )

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise TypeError("Implicit conversion to a NumPy array is not allowed")  # as CuPy

        def __getitem__(self, key: Any) -> "ndarray":
            return ndarray(self._data[key])

        def reshape(self, *shape: Any, order: str = "C") -> "ndarray":
            return ndarray(self._data.reshape(*shape, order=order))

        def get(self, out: np.ndarray | None = None) -> np.ndarray:
            counters.to_host += 1
            if out is None:
                return self._data.copy()
            assert out.shape == self.shape
            assert out.dtype == self.dtype
            np.copyto(out, self._data)
            return out

        def set(self, array: np.ndarray) -> None:
            counters.to_device += 1
            assert type(array) is np.ndarray
            assert array.shape == self.shape
            np.copyto(self._data, array)

    class Stream:
        def synchronize(self) -> None:
            counters.synchronized += 1

    def alloc_pinned_memory(nbytes: int) -> bytearray:
        counters.pinned_bytes += nbytes
        return bytearray(nbytes)

    ndarray.__module__ = "cupy"
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 0, getDevice=lambda: 1)
    cuda = types.SimpleNamespace(get_current_stream=Stream, alloc_pinned_memory=alloc_pinned_memory, runtime=runtime)
    for name, value in {
        "ndarray": ndarray,
        "cuda": cuda,
        "counters": counters,
        "asarray": lambda data: ndarray(np.array(data)),
        "zeros": lambda length, dtype: ndarray(np.zeros(length, dtype)),
    }.items():
        setattr(cupy, name, value)
    return cupy


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    cupy = make()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy
