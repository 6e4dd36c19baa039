"""A GPU for machines without one: the streams, events and NCCL calls that `allreduce` and `trainers` use.

Work on a stream is done at once, so results are right in any order. The order of streams is checked separately: every
access to memory is recorded with the events for which its stream has waited. Two accesses, one of them a write, are a
race if neither stream has waited for the other. No stream waits for another implicitly, not even the default stream,
which is stricter than CUDA.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

Clock = dict[int, int]  # how far each stream is, by its pointer


class Access(NamedTuple):
    stream: int
    number: int  # of the stream's work
    start: int
    stop: int
    writes: bool
    what: str


class Gpu:
    """The state of the one device: the progress of its streams, and the accesses to each memory."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {0: {}}
        self.host: Clock = {}  # what the host has waited for
        self.races: list[str] = []
        self.synchronized = 0  # how often the host has waited
        self.log: list[str] = []  # what was called, in order
        self._accesses: list[Access] = []
        self._tracked: list[tuple[int, int]] = []
        self._lock = threading.RLock()
        self._local = threading.local()

    @property
    def current(self) -> int:
        """The pointer of the current stream of CuPy in this thread."""
        return getattr(self._local, "stream", 0)

    @current.setter
    def current(self, pointer: int) -> None:
        self._local.stream = pointer

    @property
    def of_torch(self) -> int:
        """The pointer of the current stream of PyTorch in this thread."""
        return getattr(self._local, "of_torch", 0)

    @of_torch.setter
    def of_torch(self, pointer: int) -> None:
        self._local.of_torch = pointer

    def new_stream(self) -> int:
        with self._lock:
            pointer = 0x1000 * len(self.clocks)
            self.clocks[pointer] = {}
            return pointer

    def track(self, start: int, nbytes: int) -> None:
        """Look for races in this memory from now on."""
        self._tracked.append((start, start + nbytes))

    def forget(self) -> None:
        """Forget all memory: it is freed, and may be allocated again."""
        with self._lock:
            self._accesses, self._tracked = [], []

    def access(self, start: int, nbytes: int, writes: bool, what: str, stream: int | None = None) -> None:
        """Record that work on a stream reads or writes memory."""
        if not any(start < stop and begin < start + nbytes for begin, stop in self._tracked):
            return
        with self._lock:
            pointer = self.current if stream is None else stream
            clock = self.clocks[pointer]
            merge(clock, self.host)
            number = clock[pointer] = clock.get(pointer, 0) + 1
            mine = Access(pointer, number, start, start + nbytes, writes, what)
            for other in self._accesses:
                meets = other.start < mine.stop and mine.start < other.stop and (other.writes or mine.writes)
                if meets and clock.get(other.stream, 0) < other.number:
                    self.races.append(
                        f"{mine.what} on {pointer:#x} does not wait for {other.what} on {other.stream:#x}"
                    )
            self._accesses = [  # those of which this one stands for what comes
                each for each in self._accesses
                if not (mine.writes and mine.start <= each.start and each.stop <= mine.stop)
            ]  # fmt: skip
            self._accesses.append(mine)
            self.log.append(f"{what} on {pointer:#x}")

    def record(self, pointer: int) -> Clock:
        with self._lock:
            clock = self.clocks[pointer]
            merge(clock, self.host)
            return dict(clock)

    def wait(self, pointer: int, recorded: Clock | None) -> None:
        """Make a stream wait for an event; None stands for an event that was never recorded."""
        with self._lock:
            if recorded is not None:
                merge(self.clocks[pointer], recorded)

    def synchronize(self, recorded: Clock) -> None:
        """The host waits."""
        with self._lock:
            self.synchronized += 1
            merge(self.host, recorded)


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Streams:
    """CuPy's streams, events and devices, on one Gpu: attributes of `cupy.cuda`."""

    def __init__(self, gpu: Gpu) -> None:
        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
                self.recorded: Clock | None = None

            def record(self, stream: Any = None) -> None:
                self.recorded = gpu.record(gpu.current if stream is None else stream.ptr)

            def synchronize(self) -> None:
                gpu.synchronize(self.recorded or {})

        class Stream:
            def __init__(
                self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
            ) -> None:
                self.ptr = 0 if null else gpu.new_stream()

            @classmethod
            def from_external(cls, obj: Any) -> "Stream":
                stream = cls(null=True)
                stream.ptr = obj.__cuda_stream__()[1]
                return stream

            def synchronize(self) -> None:
                gpu.synchronize(gpu.record(self.ptr))

            def wait_event(self, event: Event) -> None:
                gpu.wait(self.ptr, event.recorded)

            def __enter__(self) -> "Stream":
                self._before = gpu.current
                gpu.current = self.ptr
                return self

            def __exit__(self, *_: object) -> None:
                gpu.current = self._before

        class Device:
            def __init__(self, device: int | None = None) -> None:
                self.id = device or 0

            def use(self) -> None:
                pass

            def __enter__(self) -> "Device":
                return self

            def __exit__(self, *_: object) -> None:
                pass

        def get_current_stream(device_id: int = -1) -> Stream:
            stream = Stream(null=True)
            stream.ptr = gpu.current
            return stream

        self.Event, self.Stream, self.Device, self.get_current_stream = Event, Stream, Device, get_current_stream


class TorchCuda:
    """The parts of `torch.cuda` that trainers.pytorch.devices uses, on the same Gpu."""

    def __init__(self, gpu: Gpu) -> None:
        class Event:
            def __init__(self, recorded: Clock) -> None:
                self.recorded = recorded

            def synchronize(self) -> None:
                gpu.synchronize(self.recorded)

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.cuda_stream = gpu.new_stream()

            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, self.cuda_stream

            def record_event(self, event: Any = None) -> Event:
                return Event(gpu.record(self.cuda_stream))

            def wait_event(self, event: Event) -> None:
                gpu.wait(self.cuda_stream, event.recorded)

        self._gpu, self.Stream, self.Event = gpu, Stream, Event

    def current_stream(self, device: Any = None) -> Any:
        stream = self.Stream.__new__(self.Stream)
        stream.cuda_stream = self._gpu.of_torch
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._gpu.of_torch = self._gpu.of_torch, stream.cuda_stream
        try:
            with Noting(self._gpu):
                yield
        finally:
            self._gpu.of_torch = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def get_rng_state(self, device: Any = "cuda") -> Any:
        import torch

        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, new_state: Any, device: Any = "cuda") -> None:
        assert new_state.numel() == 16

    def synchronize(self, device: Any = None) -> None:
        for pointer in list(self._gpu.clocks):
            self._gpu.synchronize(self._gpu.record(pointer))


def Noting(gpu: Gpu) -> Any:  # noqa: N802, it makes what is a class where PyTorch is
    """Context manager: PyTorch's work in the block is recorded on the current stream."""
    from torch import Tensor, strided
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            schema = func._schema
            views = func.is_view
            for number, argument in enumerate(schema.arguments):
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for each in () if views and not writes else tree_iter(value):
                    if isinstance(each, Tensor) and each.layout == strided and each.numel():
                        gpu.access(each.data_ptr(), extent(each), writes, str(func), gpu.of_torch)
            return func(*args, **kwargs)

    return Mode()


def extent(tensor: Any) -> int:
    """Return the first byte of an array, and the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Nccl:
    """`cupy.cuda.nccl` over MPI, on all ranks of `comm`."""

    def __init__(self, gpu: Gpu, comm: MPI.Intracomm, version: int = 23203) -> None:
        dtypes = {0: "i1", 1: "u1", 2: "i4", 4: "i8", 6: "u2", 7: "f4", 8: "f8", 9: "u2"}
        ops = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin, 4: np.add}  # which drop NaN, as NCCL's

        class NcclError(RuntimeError):
            pass

        class NcclCommunicator:
            def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:  # noqa: N803
                if not isinstance(commId, bytes):
                    raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId)})")
                assert len(commId) == 128
                assert (ndev, rank) == (comm.size, comm.rank)
                self._comm = comm.Dup()
                assert self._comm.bcast(commId) == commId

            def destroy(self) -> None:
                self._comm.Free()

            def abort(self) -> None:
                gpu.log.append("abort")

            def allReduce(  # noqa: N802
                self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
            ) -> None:
                found = self._combined(sendbuf, count, datatype, op, stream, "allReduce")
                self._write(recvbuf, found, stream, "allReduce")

            def reduce(
                self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
            ) -> None:
                found = self._combined(sendbuf, count, datatype, op, stream, "reduce")
                if comm.rank == root:
                    self._write(recvbuf, found, stream, "reduce")

            def reduceScatter(  # noqa: N802
                self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
            ) -> None:
                found = self._combined(sendbuf, recvcount * comm.size, datatype, op, stream, "reduceScatter")
                self._write(recvbuf, found[recvcount * comm.rank :][:recvcount], stream, "reduceScatter")

            def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
                mine = self._read(sendbuf, count, datatype, stream, "allGather")
                found = np.empty(count * comm.size, mine.dtype)
                self._comm.Allgather(mine, found)
                self._write(recvbuf, found, stream, "allGather")

            def broadcast(
                self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
            ) -> None:
                found = self._read(sendbuff, count, datatype, stream, "broadcast")
                self._comm.Bcast(found, root)
                self._write(recvbuff, found, stream, "broadcast")

            def _combined(self, start: int, count: int, datatype: int, op: int, stream: int, what: str) -> np.ndarray:
                assert datatype not in (6, 9), "16-bit floats are moved, and summed as float32"
                found = self._read(start, count, datatype, stream, what)
                everyone = np.empty((comm.size, count), found.dtype)
                self._comm.Allgather(found, everyone)
                result = ops[op].reduce(everyone, dtype=found.dtype)  # in the order of the ranks, wherever it is cut
                return result / found.dtype.type(comm.size) if op == 4 else result

            def _read(self, start: int, count: int, datatype: int, stream: int, what: str) -> np.ndarray:
                dtype = np.dtype(dtypes[datatype])
                gpu.access(start, count * dtype.itemsize, False, f"nccl {what} reads", stream)
                return np.frombuffer(ctypes.string_at(start, count * dtype.itemsize), dtype).copy()

            def _write(self, start: int, found: np.ndarray, stream: int, what: str) -> None:
                found = np.ascontiguousarray(found)
                gpu.access(start, found.nbytes, True, f"nccl {what} writes", stream)
                ctypes.memmove(start, found.ctypes.data, found.nbytes)

        self.NcclError, self.NcclCommunicator = NcclError, NcclCommunicator
        self.get_version = lambda: version
        self.get_unique_id = lambda: bytes(range(100, 228))
        self.groupStart = lambda: None
        self.groupEnd = lambda: None
