"""CuPy arrays: detection without importing CuPy, selection of device and stream, staging through pinned host memory."""

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.errors import UnavailableError

EXTRA = 'install one of the extras "cuda12" or "cuda13" (pip install ".[cuda12]" in the checkout)'


def is_gpu_array(array: object) -> bool:
    """True for a CuPy array; CuPy is not imported to find out."""
    return type(array).__module__.partition(".")[0] == "cupy"


def cupy() -> Any:
    """Import and return CuPy. Raises UnavailableError, which says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(f"CuPy can't be imported ({error}); {EXTRA}") from error
    return cupy


def write(array: Any, values: Any) -> None:
    """Copy numbers into an array of NumPy or CuPy, which takes no tuples, and no arrays of NumPy. Local."""
    array[...] = cupy().asarray(values) if is_gpu_array(array) else values


def on_host(array: Any) -> np.ndarray:
    """Return an array of NumPy unchanged, or a copy of an array of CuPy. Local."""
    return array.get() if is_gpu_array(array) else array


def missing() -> UnavailableError | None:
    """Return the error that names what "nccl" lacks here (CuPy, NCCL or a GPU), or None. Local."""
    try:
        if cupy().cuda.runtime.getDeviceCount() == 0:
            return UnavailableError('"nccl" needs an NVIDIA GPU and there is none here; use another backend')
    except UnavailableError as error:
        return UnavailableError(f'"nccl" needs CuPy: {error}')
    except Exception as error:  # without a driver CuPy raises its own errors
        return UnavailableError(f'"nccl" needs an NVIDIA GPU, and CuPy finds none ({error}); use another backend')
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except Exception as error:  # an import error, or CuPy's own when the library can't be loaded
        return UnavailableError(f'"nccl" needs NCCL, which CuPy can\'t load ({error}); {EXTRA}')
    return None


def identity(runtime: Any, device: int) -> str:
    """Return a text that identifies this rank's GPU among all hosts. Local.

    The UUID is not enough: CuPy cuts it off at its first zero byte. The boot id identifies the machine, because
    containers may share a host name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    uuid = bytes(runtime.getDeviceProperties(device)["uuid"]).hex()
    return f"{machine} {runtime.deviceGetPCIBusId(device)} {uuid}"


_device: int | None = None  # the GPU that this process uses; see `choose_device`


def set_device(device: int) -> None:
    """Make GPU `device` this rank's GPU, also if it is 0. Local."""
    global _device
    _device = device


def choose_device(node_rank: int) -> None:
    """Make this rank's GPU current in this thread. Local.

    The rank's GPU is fixed at the first call: the current device if it is not 0 (the program has selected it),
    otherwise node_rank modulo the number of GPUs. Raises UnavailableError.
    """
    global _device
    runtime = cupy().cuda.runtime
    try:
        current = runtime.getDevice()
        if _device is None:
            _device = current or node_rank % runtime.getDeviceCount()
        if current == 0 != _device:
            cupy().cuda.Device(_device).use()
    except Exception as error:  # CuPy without a driver or a GPU raises its own types of errors
        raise UnavailableError(f"an NVIDIA GPU is needed, and CuPy finds none ({error})") from error


def synchronize() -> None:
    """Wait for the current CUDA stream: MPI does not know about streams."""
    cupy().cuda.get_current_stream().synchronize()


def stream_of(stream: Any, device: int) -> Any:
    """Return CuPy's object for a PyTorch stream on GPU `device`; `with` makes it CuPy's current stream."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):  # since CuPy 14
        return streams.Stream.from_external(stream)
    return streams.ExternalStream(stream.cuda_stream, device)


def on_current_stream(work: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `work` so that another thread runs it on this thread's current device and stream."""
    device, stream = cupy().cuda.Device(), cupy().cuda.get_current_stream()

    def there() -> Any:
        with device, stream:
            return work()

    return there


class StreamOrder:
    """Orders calls on different streams that share GPU memory."""

    def __init__(self) -> None:
        self._done: Any = None

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Context manager: the current stream waits for the previous call; the next call waits for this one."""
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


def pinned(nbytes: int) -> np.ndarray:
    """Return host memory that the GPU copies to and from at full speed, for arrays on their way through the CPU."""
    return np.frombuffer(cupy().cuda.alloc_pinned_memory(nbytes), dtype=np.uint8, count=nbytes)


@functools.cache
def mpi_is_cuda_aware() -> bool:
    """Return True if this MPI is known to accept device pointers (an MPI that does not crashes on them).

    ALLREDUCE_CUDA_AWARE=1 or 0 decides; without it the MPI library is asked (MPIX_Query_cuda_support, which Open MPI
    and MPICH's derivatives offer). MPI libraries that can't be asked count as not aware.
    """
    value = os.environ.get("ALLREDUCE_CUDA_AWARE")
    if value is not None:
        return value == "1"
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False
