"""A CuPy for machines without a GPU: the parts that `allreduce` uses, on arrays that NumPy must not touch.

"Device" memory can be reached only by `get` and `set`, as on a GPU; counters count these. Every name and every
argument's name here must exist in the real CuPy too: test_cupy_drift.py checks that if CuPy is installed.
"""

import sys
import types
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce import arrays
from tests.gpu.fake_gpu import Gpu, Nccl, Streams


class Counters:
    def __init__(self) -> None:
        self.pinned_bytes = self.to_host = self.to_device = 0


def make(gpu: Gpu | None = None, comm: MPI.Intracomm | None = None) -> types.ModuleType:
    """Return a module to put into sys.modules as "cupy"; it has its own `counters`.

    gpu: the one device, whose streams order the work. comm: of the ranks that NCCL connects; without it NCCL has no
    GPU.
    """
    cupy = types.ModuleType("cupy")
    gpu, counters = gpu or Gpu(), Counters()

    def touch(data: np.ndarray, writes: bool, what: str) -> None:
        gpu.access(data.ctypes.data, data.nbytes, writes, f"cupy {what}")

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
        data = property(lambda self: types.SimpleNamespace(ptr=self._data.ctypes.data))
        device = property(lambda self: Device(0))

        @property
        def flags(self) -> types.SimpleNamespace:  # CuPy's has no more than these
            flags = self._data.flags
            return types.SimpleNamespace(
                c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=flags.owndata
            )

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise TypeError("Implicit conversion to a NumPy array is not allowed")  # as CuPy

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, key: Any) -> "ndarray":
            return ndarray(self._data[(key, ...) if isinstance(key, int) else key])  # an element has 0 dimensions

        def __setitem__(self, key: Any, value: Any) -> None:
            if isinstance(value, ndarray):
                touch(value._data, False, "copy")
                value = value._data
            elif isinstance(value, np.ndarray) and value.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")  # as CuPy
            elif isinstance(value, list | tuple):
                raise TypeError(f"Unsupported type {type(value)}")  # as CuPy
            touch(self._data[key], True, "copy")
            self._data[key] = value

        def __imul__(self, other: Any) -> "ndarray":
            return computed(np.multiply, (self, other), self)

        def __gt__(self, other: Any) -> "ndarray":
            return computed(np.greater, (self, other))

        def __and__(self, other: Any) -> "ndarray":
            return computed(np.logical_and, (self, other))

        def __sub__(self, other: Any) -> "ndarray":
            return computed(np.subtract, (self, other))

        def __rtruediv__(self, other: Any) -> "ndarray":
            return computed(np.divide, (other, self))

        def __abs__(self) -> "ndarray":
            return computed(np.abs, (self,))

        def tolist(self) -> Any:
            return self.get().tolist()

        def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> "ndarray":
            return ndarray(self._data.reshape(*shape, order=order))

        def view(self, dtype: Any = None, type: Any = None) -> "ndarray":
            return ndarray(self._data.view(dtype))

        def astype(
            self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
        ) -> "ndarray":
            touch(self._data, False, "astype")
            return ndarray(self._data.astype(dtype))

        def dot(self, b: "ndarray", out: Any = None) -> Any:
            touch(self._data, False, "dot")
            return np.dot(self._data, b._data)

        def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
            counters.to_host += 1
            touch(self._data, False, "get")
            gpu.synchronize(gpu.record(gpu.current))
            if out is None:
                return self._data.copy()
            assert out.shape == self.shape
            assert out.dtype == self.dtype
            np.copyto(out, self._data)
            return out

        def set(self, arr: np.ndarray, stream: Any = None) -> None:
            counters.to_device += 1
            assert type(arr) is np.ndarray
            assert arr.shape == self.shape
            touch(self._data, True, "set")
            np.copyto(self._data, arr)

        def __dlpack__(
            self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
        ) -> Any:
            return self._data.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._data.__dlpack_device__()

    def computed(function: np.ufunc, values: tuple[Any, ...], out: ndarray | None = None) -> ndarray:
        for each in values:
            if isinstance(each, ndarray):
                touch(each._data, False, function.__name__)
        result = function(*(each._data if isinstance(each, ndarray) else each for each in values))
        if out is None:
            return ndarray(np.asarray(result))
        touch(out._data, True, function.__name__)
        out._data[...] = result
        return out

    def alloc_pinned_memory(size: int) -> bytearray:
        counters.pinned_bytes += size
        return bytearray(size)

    streams = Streams(gpu)
    Device = streams.Device  # noqa: N806
    ndarray.__module__ = "cupy"
    number = 0 if comm is None else 1
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: number,
        getDevice=lambda: 0 if number else 1,
        # the UUID is one that begins with a zero byte, which cuts it off
        getDeviceProperties=lambda device: {"name": b"H200", "totalGlobalMem": 141 << 30, "uuid": b""},
        deviceGetPCIBusId=lambda device: f"0000:{comm.rank if comm is not None else 0:02x}:00.0",
    )
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.runtime, cuda.alloc_pinned_memory = runtime, alloc_pinned_memory
    cuda.get_elapsed_time = lambda start_event, end_event: 1.0
    for name in ("Event", "Stream", "Device", "get_current_stream"):
        setattr(cuda, name, getattr(streams, name))
    if comm is not None:
        cuda.nccl = Nccl(gpu, comm)
    for name, value in {
        "__version__": "14.2.0",
        "ndarray": ndarray,
        "cuda": cuda,
        "counters": counters,
        "gpu": gpu,
        "asarray": lambda a: a if isinstance(a, ndarray) else ndarray(np.array(a)),
        "from_dlpack": lambda array: ndarray(np.from_dlpack(array)),
        "empty": lambda shape, dtype: ndarray(np.empty(shape, dtype)),
        "zeros": lambda shape, dtype: ndarray(np.zeros(shape, dtype)),
        "add": lambda x1, x2, out=None: computed(np.add, (x1, x2), out),
        "multiply": lambda x1, x2, out=None: computed(np.multiply, (x1, x2), out),
        "isnan": lambda x: computed(np.isnan, (x,)),
        "where": lambda condition, x, y: computed(np.where, (condition, x, y)),  # type: ignore[arg-type]
    }.items():
        setattr(cupy, name, value)
    return cupy


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None = None, comm: MPI.Intracomm | None = None) -> Any:
    cupy = make(gpu, comm)
    monkeypatch.setattr(arrays.gpu, "_device", None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    return cupy
