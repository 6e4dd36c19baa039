"""The device of a model: the CPU, or one CUDA device, on which events order the work of different streams.

All that MirroredOptimizer knows of CUDA is here. A stream does its work in order, and does not wait for other streams.
So a call that reads or writes tensors in the queue's thread is a `Crossing`: its work, on the device's own stream,
comes after the work of the streams that have written the tensors, and before later work of the stream that uses the
results. The host waits for none of this: when a call has returned, its work may still be under way.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


class Crossing:
    """A call whose work another thread does. On the CPU there is nothing to do: threads see each other's writes."""

    def note(self) -> None:
        """The current stream writes tensors that the call reads. In the caller's thread, as often as needed."""

    def leave(self) -> None:
        """All tensors that the call reads have been written or are being written. In the caller's thread."""

    def inside(self) -> AbstractContextManager[object]:
        """For the work, in the queue's thread."""
        return nullcontext()

    def back(self) -> None:
        """Later work of the current stream comes after the call's work. In any thread."""


class Host:
    """The CPU."""

    kind = "cpu"
    device = torch.device("cpu")

    def crossing(self) -> Crossing:
        return Crossing()

    def current(self) -> AbstractContextManager[object]:
        """Inside, memory that is allocated is this device's."""
        return nullcontext()

    def finish(self) -> None:
        """Wait until the device is idle, before memory is freed that it may still use."""

    @contextmanager
    def between(self) -> Iterator[None]:
        """PyTorch's work inside comes after CuPy's work before, and before CuPy's work afterwards."""
        self.take_back()
        try:
            yield
        finally:
            self.hand_over()

    def random_states(self) -> dict[str, np.ndarray]:
        """PyTorch's, copies."""
        return {"random": torch.get_rng_state().numpy()}

    def set_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        """As `random_states` gave them, perhaps on another kind of device."""
        torch.set_rng_state(torch.from_numpy(np.array(states["random"])))

    def numbers(self, found: Sequence[torch.Tensor]) -> Any:
        """One number of each tensor, as a replica gives them to a trainer."""
        return [float(each) for each in found]

    def hand_over(self) -> None:
        """CuPy's work from now on in this thread comes after PyTorch's work until now."""

    def take_back(self) -> None:
        """PyTorch's work from now on in this thread comes after CuPy's work until now."""


class Cuda(Host):
    """One CUDA device. api: `torch.cuda`, or a stand-in of tests."""

    kind = "cuda"

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self.device, self.api = device, api
        self.stream = api.Stream(device)

    def __deepcopy__(self, memo: object) -> "Cuda":
        return self  # copies of a model share it

    def crossing(self) -> Crossing:
        return _Streams(self)

    def current(self) -> AbstractContextManager[object]:
        return self.api.device(self.device)

    def finish(self) -> None:
        self.api.synchronize(self.device)

    def random_states(self) -> dict[str, np.ndarray]:
        return super().random_states() | {"random.gpu": self.api.get_rng_state(self.device).numpy()}

    def set_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        super().set_random_states(states)
        if "random.gpu" in states:
            self.api.set_rng_state(torch.from_numpy(np.array(states["random.gpu"])), self.device)

    def numbers(self, found: Sequence[torch.Tensor]) -> Any:
        """As an array of CuPy's, so that the host waits for nothing."""
        stacked = torch.stack([torch.as_tensor(each, dtype=torch.float32, device=self.device) for each in found])
        self.hand_over()
        with self.current():  # PyTorch exports no tensor of another GPU
            return _cupy().from_dlpack(stacked)

    def hand_over(self) -> None:
        with self.current():
            ours, theirs = self._streams()
            _follow(theirs, ours)

    def take_back(self) -> None:
        with self.current():
            ours, theirs = self._streams()
            _follow(ours, theirs)

    def _streams(self) -> tuple[Any, Any]:
        """PyTorch's and CuPy's current streams, both as CuPy's objects."""
        stream = self.api.current_stream(self.device)
        return _as_cupys(stream, self.device), _cupy().cuda.get_current_stream()


def _cupy() -> Any:
    import cupy

    return cupy


def _as_cupys(stream: Any, device: torch.device) -> Any:
    """CuPy's object for a stream of PyTorch's."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):  # since CuPy 14
        return cuda.Stream.from_external(stream)
    return cuda.ExternalStream(stream.cuda_stream, device.index)


def _follow(stream: Any, other: Any) -> None:
    """Have later work of a CuPy stream come after the work of another until now."""
    if stream.ptr != other.ptr:
        event = _cupy().cuda.Event(disable_timing=True)
        event.record(other)
        stream.wait_event(event)


class _Streams(Crossing):
    """The Crossing of a CUDA device: an event on each stream that has written, and one on the call's stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._writers: dict[int, Any] = {}  # streams, by their pointers
        self._written: list[Any] = []
        self._done: Any = None

    def note(self) -> None:
        stream = self._cuda.api.current_stream(self._cuda.device)
        self._writers[stream.cuda_stream] = stream

    def leave(self) -> None:
        self.note()
        self._written = [stream.record_event() for stream in self._writers.values()]

    @contextmanager
    def inside(self) -> Iterator[None]:
        api, stream = self._cuda.api, self._cuda.stream
        with ExitStack() as entered:
            entered.enter_context(api.device(self._cuda.device))
            entered.enter_context(api.stream(stream))
            if "cupy" in sys.modules:  # without it the backend has no arrays of its
                entered.enter_context(_as_cupys(stream, self._cuda.device))
            for event in self._written:
                stream.wait_event(event)
            try:
                yield
            finally:
                self._done = stream.record_event()

    def back(self) -> None:
        if self._done is not None:
            self._cuda.api.current_stream(self._cuda.device).wait_event(self._done)


def device_of(tensors: Iterable[torch.Tensor]) -> Host:
    """The device of these tensors, which are all on one."""
    device = next(iter(tensors)).device
    return Cuda(device) if device.type == "cuda" else Host()
