"""The device of a model: the CPU, or one CUDA device. Events order the work of different CUDA streams.

All CUDA-specific code of MirroredOptimizer and TorchReplica is here. A stream does its work in order, and does not wait
for other streams. So every call that runs in the queue's thread has a `StreamOrder`: its work, on the device's own
stream, comes after the work of the streams that have written the tensors, and before later work of the stream that uses
the results. The host waits for none of this: when a call has returned, the GPU may still run its work.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from trainers.replicas.pytorch.tensors import as_array, numpy_dtype


class StreamOrder:
    """Orders the GPU work of a call that another thread runs, relative to the caller's streams. The CPU needs
    nothing."""

    def mark_writer(self) -> None:
        """Record that the current stream writes inputs of the call. In the caller's thread, any number of times."""

    def submitted(self) -> None:
        """Record that the writes of all inputs have been submitted. In the caller's thread, before the call runs."""

    def running(self) -> AbstractContextManager[object]:
        """Context manager for the call's work, in the queue's thread."""
        return nullcontext()

    def wait_on_stream(self) -> None:
        """Make later work of the current stream wait for the call's work. In any thread."""


class Host:
    """The CPU."""

    kind = "cpu"
    device = torch.device("cpu")

    def crossing(self) -> StreamOrder:
        return StreamOrder()

    def current(self) -> AbstractContextManager[object]:
        """Context manager: memory is allocated on this device in the block."""
        return nullcontext()

    def finish(self) -> None:
        """Wait until the device is idle, before memory is freed that it may still use."""

    @contextmanager
    def ordered_with_cupy(self) -> Iterator[None]:
        """Context manager: PyTorch's work in the block runs after earlier CuPy work, and before later CuPy work."""
        self.torch_after_cupy()
        try:
            yield
        finally:
            self.cupy_after_torch()

    def random_states(self) -> dict[str, np.ndarray]:
        """Return copies of PyTorch's random states."""
        return {"random": torch.get_rng_state().numpy()}

    def set_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        """Load a result of `random_states`, possibly from another kind of device."""
        torch.set_rng_state(torch.from_numpy(np.array(states["random"])))

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host on this device, for `use`. Only the calling thread waits for a copy."""
        return tensor

    def use(self, tensor: torch.Tensor) -> None:
        """Call before work of the current stream on a result of `stage`, whose memory is then kept until that work is
        done."""

    def numbers(self, found: Sequence[torch.Tensor]) -> Any:
        """Return the value of each one-element tensor: a list of floats, or on a GPU a CuPy array."""
        return [float(each) for each in found]

    def array(self, tensor: torch.Tensor) -> Any:
        """Return a NumPy or CuPy array in the memory of a contiguous tensor of one of DTYPES."""
        return as_array(tensor)

    def cupy_after_torch(self) -> None:
        """Make later CuPy work of this thread wait for PyTorch's work so far."""

    def torch_after_cupy(self) -> None:
        """Make later PyTorch work of this thread wait for CuPy's work so far."""


class Cuda(Host):
    """One CUDA device. api: `torch.cuda`, or a fake for tests."""

    kind = "cuda"

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self.device, self.api = device, api
        self.stream = api.Stream(device)
        self._copies: Any = None  # the stream of `stage`

    def __deepcopy__(self, memo: object) -> "Cuda":
        return self  # copies of a model share the device object

    def crossing(self) -> StreamOrder:
        return _Streams(self)

    def current(self) -> AbstractContextManager[object]:
        return self.api.device(self.device)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._copies is None:
            self._copies = self.api.Stream(self.device)
        with self.api.device(self.device), self.api.stream(self._copies):
            copied = torch.empty_like(tensor, device=self.device).copy_(tensor.pin_memory(), non_blocking=True)
        self._copies.record_event().synchronize()
        return copied

    def use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.api.current_stream(self.device))

    def finish(self) -> None:
        self.api.synchronize(self.device)

    def random_states(self) -> dict[str, np.ndarray]:
        return super().random_states() | {"random.gpu": self.api.get_rng_state(self.device).numpy()}

    def set_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        super().set_random_states(states)
        if "random.gpu" in states:
            self.api.set_rng_state(torch.from_numpy(np.array(states["random.gpu"])), self.device)

    def numbers(self, found: Sequence[torch.Tensor]) -> Any:
        """As a CuPy array, so that the host need not wait for the GPU."""
        stacked = torch.stack([torch.as_tensor(each, dtype=torch.float32, device=self.device) for each in found])
        self.cupy_after_torch()
        with self.current():  # PyTorch exports no tensor of another GPU
            return _cupy().from_dlpack(stacked)

    def array(self, tensor: torch.Tensor) -> Any:
        with self.current():  # PyTorch exports no tensor of another GPU
            if tensor.dtype != torch.bfloat16:
                return _cupy().from_dlpack(tensor)
            return _cupy().from_dlpack(tensor.view(torch.int16)).view(numpy_dtype(tensor.dtype))

    def cupy_after_torch(self) -> None:
        with self.current():
            ours, theirs = self._streams()
            _follow(theirs, ours)

    def torch_after_cupy(self) -> None:
        with self.current():
            ours, theirs = self._streams()
            _follow(ours, theirs)

    def _streams(self) -> tuple[Any, Any]:
        """Return PyTorch's and CuPy's current streams, both as CuPy objects."""
        stream = self.api.current_stream(self.device)
        return _as_cupys(stream, self.device), _cupy().cuda.get_current_stream()


def _cupy() -> Any:
    import cupy

    return cupy


def _as_cupys(stream: Any, device: torch.device) -> Any:
    """Return a CuPy object for a PyTorch stream."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):  # since CuPy 14
        return cuda.Stream.from_external(stream)
    return cuda.ExternalStream(stream.cuda_stream, device.index)


def _follow(stream: Any, other: Any) -> None:
    """Make later work of a CuPy stream wait for the work of `other` so far."""
    if stream.ptr != other.ptr:
        event = _cupy().cuda.Event(disable_timing=True)
        event.record(other)
        stream.wait_event(event)


class _Streams(StreamOrder):
    """The StreamOrder of a CUDA device: an event on each stream that has written, and one on the call's stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._writers: dict[int, Any] = {}  # streams, by their pointers
        self._written: list[Any] = []
        self._done: Any = None

    def mark_writer(self) -> None:
        stream = self._cuda.api.current_stream(self._cuda.device)
        self._writers[stream.cuda_stream] = stream

    def submitted(self) -> None:
        self.mark_writer()
        self._written = [stream.record_event() for stream in self._writers.values()]

    @contextmanager
    def running(self) -> Iterator[None]:
        api, stream = self._cuda.api, self._cuda.stream
        with ExitStack() as entered:
            entered.enter_context(api.device(self._cuda.device))
            entered.enter_context(api.stream(stream))
            if "cupy" in sys.modules:  # otherwise the backend has no CuPy arrays
                entered.enter_context(_as_cupys(stream, self._cuda.device))
            for event in self._written:
                stream.wait_event(event)
            try:
                yield
            finally:
                self._done = stream.record_event()

    def wait_on_stream(self) -> None:
        if self._done is not None:
            self._cuda.api.current_stream(self._cuda.device).wait_event(self._done)


def device_of(tensors: Iterable[torch.Tensor]) -> Host:
    """Return the device of these tensors, which are all on one device."""
    device = next(iter(tensors)).device
    return Cuda(device) if device.type == "cuda" else Host()
