"""CuPy arrays on the way through CPU backends: recognised without importing CuPy, staged in pinned memory."""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from allreduce.arrays.workspace import Workspace
from allreduce.errors import UnavailableError

EXTRA = 'install one of the extras "cuda12" or "cuda13" (pip install ".[cuda12]" in the checkout)'


def is_gpu_array(array: object) -> bool:
    """True for a CuPy array; CuPy is not imported to find out."""
    return type(array).__module__.partition(".")[0] == "cupy"


def cupy() -> Any:
    """The module CuPy, or an error that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(f"CuPy can't be imported ({error}); {EXTRA}") from error
    return cupy


_device: int | None = None  # the GPU that this process has taken for its own; see `choose_device`


def keep_device(device: int) -> None:
    """This rank's GPU is the one that the program has chosen: 0 too. Local."""
    global _device
    _device = device


def choose_device(node_rank: int) -> None:
    """Make this rank's GPU the current one of this thread: the ranks of a node take its GPUs in turn. Local.

    A program that has made another device than 0 the current one has chosen by itself. New threads begin with 0.
    """
    global _device
    runtime = cupy().cuda.runtime
    try:
        current = runtime.getDevice()
        if _device is None:
            _device = current or node_rank % runtime.getDeviceCount()
        if current == 0 != _device:
            cupy().cuda.Device(_device).use()
    except Exception as error:  # CuPy without a driver or a GPU raises errors of its own kinds
        raise UnavailableError(f"an NVIDIA GPU is needed, and CuPy finds none ({error})") from error


def synchronize() -> None:
    """Wait for the current CUDA stream: MPI does not know about streams."""
    cupy().cuda.get_current_stream().synchronize()


def stream_of(stream: Any, device: int) -> Any:
    """CuPy's object for a stream of PyTorch's on GPU `device`; used by `with`, it is CuPy's current stream."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):  # since CuPy 14
        return streams.Stream.from_external(stream)
    return streams.ExternalStream(stream.cuda_stream, device)


def carried(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` for another thread to do: on the GPU and the stream that are current in this one."""
    device, stream = cupy().cuda.Device(), cupy().cuda.get_current_stream()

    def there() -> Any:
        with device, stream:
            return work()

    return there


class Turns:
    """The order in which calls use memory of a GPU that they have in common, whichever streams they come from."""

    def __init__(self) -> None:
        self._done: Any = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the current stream comes after the call before; the next call comes after it."""
        cuda = cupy().cuda
        stream = cuda.get_current_stream()
        if self._done is None:
            self._done = cuda.Event(disable_timing=True)
        else:
            stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)


class Pinned:
    """Host memory that the GPU copies to and from at full speed, for arrays on their way through the CPU."""

    def __init__(self) -> None:
        self._workspace: Workspace | None = None

    def like(self, array: Any) -> np.ndarray:
        """Memory for what a 1-D CuPy array holds; the same in each call, grown where it has to be."""
        if self._workspace is None:
            self._workspace = Workspace(_pinned)
        return self._workspace.array("staged", array.size, array.dtype)

    def clear(self) -> None:
        self._workspace = None


def _pinned(nbytes: int) -> np.ndarray:
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(nbytes), dtype=np.uint8, count=nbytes)


@functools.cache
def mpi_is_cuda_aware() -> bool:
    """True when this MPI is known to take device pointers; others crash on them.

    ALLREDUCE_CUDA_AWARE=1 or 0 decides; without it the MPI library is asked (MPIX_Query_cuda_support,
    which Open MPI and MPICH's derivatives offer). MPI libraries that can't be asked count as not aware.
    """
    told = os.environ.get("ALLREDUCE_CUDA_AWARE")
    if told is not None:
        return told == "1"
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False
