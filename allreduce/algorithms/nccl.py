"""NCCL: NVIDIA's collectives on CuPy arrays, through CuPy's binding. Steps and bytes are NCCL's own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from allreduce.algorithm import Context, TwoPhase, Work
from allreduce.arrays import dtypes, gpu, ops
from allreduce.arrays.memory_kinds import GPU
from allreduce.arrays.ops import Op
from allreduce.call.call import Call
from allreduce.errors import AllReduceError, OptionError, UnavailableError
from allreduce.transport.control import all_values, raise_together, root_value, together

BYTES = 1  # ncclUint8
AVERAGE = 4  # ncclAvg in nccl.h, since NCCL 2.10
AVERAGE_VERSION = 21000
Launch = Callable[[Any, int, int], None]  # takes an array, and NCCL's numbers of its dtype and of an operation
SHARED_GPU_VERSION = 23000  # since 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU


class Nccl(TwoPhase):
    """For one GPU a rank (see gpu.choose_device) and arrays on that GPU; other arrays are copied there and back.

    The NCCL communicator is created at the first use, because it binds the device that is current then.

    A call runs in order on CuPy's current stream, and may return before it is complete: read the result on that stream,
    or synchronize first.
    """

    needs_gpu = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        raise_together(self.comm, gpu.missing())
        self._cupy = gpu.cupy()
        self._nccl = self._cupy.cuda.nccl
        self._device = -1
        self._communicator: Any = None
        self._stream: Any = None
        self._ready: Any = None
        self._wide: Any = None  # the float32 sums of 16-bit arrays; grows, as a Workspace does

    def allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return super().allocate(length, dtype, device or "cuda")

    def work(self, call: Call, op: Op) -> Work:
        if call.memory != GPU:
            return super().work(call, op)
        if call.kind == "all_gather":
            return Work(self._gather_gpu)
        everything = call.kind == "all_reduce"
        launch, part = (self._all_reduce, slice(None)) if everything else (self._scatter, self.owned(call.length))
        return Work(lambda buffer: self._reduce_gpu(launch, buffer, op, part))

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Return equal slices, as NCCL needs them; the last rank's slice also has the remainder."""
        rank = self.rank if rank is None else rank
        part = length // self.size
        return slice(rank * part, length if rank == self.size - 1 else (rank + 1) * part)

    def reduce(self, buffer: np.ndarray, op: Op) -> None:
        staged = self._on_gpu(buffer, dtypes.TYPES[buffer.dtype].accumulator)
        self._reduce_gpu(self._all_reduce, staged, op, slice(None))
        np.copyto(buffer, staged.get(), casting="unsafe")

    def scatter(self, buffer: np.ndarray, op: Op) -> None:
        staged, mine = self._on_gpu(buffer, buffer.dtype), self.owned(buffer.size)
        self._reduce_gpu(self._scatter, staged, op, mine)
        buffer[mine] = staged[mine].get()

    def _reduce_gpu(self, launch: Launch, buffer: Any, op: Op, part: slice) -> None:
        """Reduce a CuPy array by the NCCL call `launch`, of which `part` is the result."""
        with self._on_nccl_stream(buffer):
            accumulator = dtypes.TYPES[buffer.dtype].accumulator
            if buffer.dtype == accumulator:
                self._reduce_in_place(launch, buffer, op, part)
                return
            wide = self._widened(buffer, accumulator)
            self._reduce_in_place(launch, wide, op, part)
            buffer[part] = wide[part].astype(buffer.dtype)  # rounds 16-bit floats, once

    def _reduce_in_place(self, launch: Launch, buffer: Any, op: Op, part: slice) -> None:
        """Reduce by NCCL into buffer[part]; for max and min also restore the NaNs that NCCL drops."""
        nans = self._cupy.where(self._cupy.isnan(buffer), buffer, 0) if op.keeps_nan(buffer.dtype) else None
        self._call(launch, buffer, op, buffer[part])
        if nans is not None:
            self._call(launch, nans, ops.OPS["sum"], nans[part])  # NaN where any rank has one, else 0
            self._cupy.add(buffer[part], nans[part], out=buffer[part])

    def all_gather(self, buffer: np.ndarray) -> None:
        if buffer.dtype not in dtypes.TYPES:  # CuPy may not know it either
            super(TwoPhase, self).all_gather(buffer)
            return
        staged = self._on_gpu(buffer, buffer.dtype)
        self._gather_gpu(staged)
        np.copyto(buffer, staged.get())

    def _gather_gpu(self, buffer: Any) -> None:
        with self._on_nccl_stream(buffer):
            self._gather(buffer)

    def _on_gpu(self, buffer: np.ndarray, dtype: np.dtype) -> Any:
        """A copy of a NumPy array on this rank's GPU."""
        gpu.choose_device(self.context.topology.node_rank)
        if self._communicator is None:
            self._connect_nccl()
        with self._cupy.cuda.Device(self._device):
            return self._cupy.asarray(buffer.astype(dtype, copy=False))

    @contextmanager
    def _on_nccl_stream(self, buffer: Any) -> Iterator[None]:
        """Context manager: make NCCL's stream CuPy's current one, between the caller's earlier and later work.

        So all calls use the scratch memory on one stream. Connects the ranks at the first use (collective then). Raises
        OptionError if the array is on another GPU.
        """
        if self._communicator is None:
            self._connect_nccl()
        if buffer.device.id != self._device:
            raise OptionError(
                f'"nccl" is connected on GPU {self._device} and the array is on GPU {buffer.device.id}; '
                "make the GPU of your arrays current before the first call"
            )
        with self._cupy.cuda.Device(self._device):
            caller = self._cupy.cuda.get_current_stream()
            self._ready.record(caller)
            self._stream.wait_event(self._ready)
            try:
                with self._stream:
                    yield
            finally:
                self._ready.record(self._stream)
                caller.wait_event(self._ready)

    def _widened(self, buffer: Any, accumulator: np.dtype) -> Any:
        """Copy a 16-bit array to scratch memory of the dtype in which it is summed."""
        if self._wide is None or self._wide.size < buffer.size:
            self._wide = self._cupy.empty(buffer.size, accumulator)
        wide = self._wide[: buffer.size]
        wide[...] = buffer
        return wide

    # Calls of NCCL; `_call` calls the two of type Launch

    def _all_reduce(self, buffer: Any, kind: int, op: int) -> None:
        pointer = buffer.data.ptr
        self._communicator.allReduce(pointer, pointer, buffer.size, kind, op, self._stream.ptr)

    def _scatter(self, buffer: Any, kind: int, op: int) -> None:
        """Reduce-scatter equal slices, and reduce the remainder to the last rank, in one group."""
        part, rest = divmod(buffer.size, self.size)
        pointer, end = buffer.data.ptr, buffer.data.ptr + (buffer.size - rest) * buffer.itemsize
        self._nccl.groupStart()
        if part:
            mine = pointer + self.rank * part * buffer.itemsize
            self._communicator.reduceScatter(pointer, mine, part, kind, op, self._stream.ptr)
        if rest:
            self._communicator.reduce(end, end, rest, kind, op, self.size - 1, self._stream.ptr)
        self._nccl.groupEnd()

    def _gather(self, buffer: Any) -> None:
        """All-gather bytes, so any dtype."""
        part, rest = (count * buffer.itemsize for count in divmod(buffer.size, self.size))
        pointer, end = buffer.data.ptr, buffer.data.ptr + part * self.size
        self._nccl.groupStart()
        if part:
            self._communicator.allGather(pointer + self.rank * part, pointer, part, BYTES, self._stream.ptr)
        if rest:
            self._communicator.broadcast(end, end, rest, BYTES, self.size - 1, self._stream.ptr)
        self._nccl.groupEnd()

    def _call(self, launch: Launch, buffer: Any, op: Op, result: Any) -> None:
        """Launch an NCCL call, and scale `result`, a part of the array, for a mean if NCCL has no average."""
        average = op.scale == 1 / self.size and self._nccl.get_version() >= AVERAGE_VERSION
        launch(buffer, dtypes.TYPES[buffer.dtype].nccl, AVERAGE if average else op.nccl)
        if op.scale is not None and not average:
            self._cupy.multiply(result, op.scale, out=result)

    def _connect_nccl(self) -> None:
        """Create the NCCL communicator on the current device. Collective."""
        cuda = self._cupy.cuda
        self._device = cuda.runtime.getDevice()
        mine = together(self.comm, lambda: gpu.identity(cuda.runtime, self._device))
        raise_together(self.comm, self._shared_gpu(all_values(self.comm, mine, "learn which GPUs the ranks have")))
        own_id = together(self.comm, lambda: list(self._nccl.get_unique_id()) if self.rank == 0 else None)
        unique_id = _as_cupy_takes_it(self._cupy, root_value(self.comm, own_id, "share NCCL's unique id"))
        error: AllReduceError | None = None
        try:
            self._communicator = self._nccl.NcclCommunicator(self.size, unique_id, self.rank)
            self._stream = cuda.Stream(non_blocking=True)
            self._ready = cuda.Event(disable_timing=True)
        except Exception as refused:  # NcclError, or CuPy's error for an NCCL code that it does not know
            error = UnavailableError(f"NCCL could not connect {self.size} ranks: {refused}; NCCL_DEBUG=INFO says more")
        raise_together(self.comm, error)

    def _shared_gpu(self, holders: list[str]) -> UnavailableError | None:
        """Return an error if this rank shares its GPU and this NCCL does not allow it. holders: the ranks' GPUs."""
        sharing = [rank for rank, holder in enumerate(holders) if holder == holders[self.rank]]
        version = self._nccl.get_version()
        allowed = version >= SHARED_GPU_VERSION and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if len(sharing) == 1 or allowed:
            return None
        return UnavailableError(
            f"ranks {sharing} hold the same GPU and NCCL {version // 10000}.{version // 100 % 100} does not allow it; "
            "start one rank per GPU, set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later, or use another backend"
        )

    def close(self) -> None:
        if self._communicator is not None:
            self._stream.synchronize()
            self._communicator.destroy()
        self._disconnect()

    def abandon(self) -> None:
        """Also abort running NCCL calls, which may wait on the GPU for failed ranks."""
        if self._communicator is not None:
            self._communicator.abort()
        self._disconnect()

    def _disconnect(self) -> None:
        self._communicator = self._stream = self._ready = self._wide = None


def _as_cupy_takes_it(cupy: Any, own_id: list[int]) -> bytes | tuple[int, ...]:
    """Convert NCCL's unique id to the form that this rank's CuPy needs: bytes since 14.0, signed chars before."""
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return bytes(number & 255 for number in own_id)
    return tuple((number & 255 ^ 128) - 128 for number in own_id)
