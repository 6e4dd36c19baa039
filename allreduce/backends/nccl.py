"""NCCL: NVIDIA's collectives on CuPy arrays, through CuPy's binding. Steps and bytes are NCCL's own."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.arrays import dtypes, gpu, ops
from allreduce.arrays.ops import Op
from allreduce.backend import TwoPhase
from allreduce.errors import AllReduceError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, raise_together, root_value, together

BYTES = 1  # ncclUint8
AVERAGE = 4  # ncclAvg in nccl.h, since NCCL 2.10
AVERAGE_VERSION = 21000
SHARED_GPU_VERSION = 23000  # since 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU


class Nccl(TwoPhase):
    """One GPU a rank (see gpu.choose_device), and arrays on that GPU; others are copied there and back.

    The NCCL communicator is made at the first use, because it binds the device that is current then.

    What a call does is ordered by CuPy's current stream, and not done yet when it returns: whoever reads the result
    does so on that stream, or waits for it.
    """

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        topology.agree([], '"nccl"', _missing())
        super().__init__(topology, check=check)

    def _connect(self, topology: Topology) -> None:
        super()._connect(topology)
        self._cupy = gpu.cupy()
        self._nccl = self._cupy.cuda.nccl
        self._device = -1
        self._communicator: Any = None
        self._stream: Any = None
        self._ready: Any = None
        self._wide: Any = None  # the float32 sums of 16-bit arrays; grows, as a Workspace does

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        return super()._allocate(length, dtype, device or "cuda")

    def owned(self, length: int, rank: int | None = None) -> slice:
        """Equal parts, as NCCL has them; the last rank's has what is left over."""
        rank = self.rank if rank is None else rank
        part = length // self.size
        return slice(rank * part, length if rank == self.size - 1 else (rank + 1) * part)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        staged = self._on_gpu(buffer, dtypes.TYPES[buffer.dtype].accumulator)
        self._reduce_gpu(staged, op)
        np.copyto(buffer, staged.get(), casting="unsafe")

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        with self._settled_on(buffer):
            accumulator = dtypes.TYPES[buffer.dtype].accumulator
            if buffer.dtype == accumulator:
                self._reduce_in_place(buffer, op)
                return
            wide = self._widened(buffer, accumulator)
            self._reduce_in_place(wide, op)
            buffer[...] = wide.astype(buffer.dtype)  # rounds 16-bit floats, once

    def _reduce_in_place(self, buffer: Any, op: Op) -> None:
        """All-reduce in NCCL, and let no NaN be lost, as its maximum and minimum do."""
        lost = self._lost(buffer, op)
        self._call(self._all_reduce, buffer, op)
        if lost is not None:
            self._call(self._all_reduce, lost, ops.OPS["sum"])  # NaN where any rank has one, else 0
            self._cupy.add(buffer, lost, out=buffer)

    def _reduce_scatter(self, buffer: np.ndarray, op: Op) -> None:
        staged, mine = self._on_gpu(buffer, buffer.dtype), self.owned(buffer.size)
        self._scatter_gpu(staged, op)
        buffer[mine] = staged[mine].get()

    def _scatter_gpu(self, buffer: Any, op: Op) -> None:
        with self._settled_on(buffer):
            accumulator, mine = dtypes.TYPES[buffer.dtype].accumulator, self.owned(buffer.size)
            if buffer.dtype == accumulator:
                self._scatter_in_place(buffer, op, mine)
                return
            wide = self._widened(buffer, accumulator)
            self._scatter_in_place(wide, op, mine)
            buffer[mine] = wide[mine].astype(buffer.dtype)

    def _scatter_in_place(self, buffer: Any, op: Op, mine: slice) -> None:
        """As `_reduce_in_place`; what is `mine` is finished then."""
        lost = self._lost(buffer, op)
        self._call(self._scatter, buffer, op, buffer[mine])
        if lost is not None:
            self._call(self._scatter, lost, ops.OPS["sum"], lost[mine])
            self._cupy.add(buffer[mine], lost[mine], out=buffer[mine])

    def _all_gather(self, buffer: np.ndarray) -> None:
        if buffer.dtype not in dtypes.TYPES:  # nor may CuPy know it
            self._hand_round([buffer[self.owned(buffer.size, rank)] for rank in range(self.size)])
            return
        staged = self._on_gpu(buffer, buffer.dtype)
        self._gather_gpu(staged)
        np.copyto(buffer, staged.get())

    def _gather_gpu(self, buffer: Any) -> None:
        with self._settled_on(buffer):
            self._gather(buffer)

    def _on_gpu(self, buffer: np.ndarray, dtype: np.dtype) -> Any:
        """A copy of a NumPy array on this rank's GPU."""
        gpu.choose_device(self.topology.node_rank)
        if self._communicator is None:
            self._join_gpus()
        with self._cupy.cuda.Device(self._device):
            return self._cupy.asarray(buffer.astype(dtype, copy=False))

    @contextmanager
    def _settled_on(self, buffer: Any) -> Iterator[None]:
        """Inside, what CuPy does is on NCCL's stream: after what the caller's has already, before what that gets next.

        So all calls use the scratch memory on one stream, whichever streams they come from. The ranks are connected
        before, and the array is where they are. Collective at the first time.
        """
        if self._communicator is None:
            self._join_gpus()
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
        """A copy of a 16-bit array as what its sums are formed in."""
        if self._wide is None or self._wide.size < buffer.size:
            self._wide = self._cupy.empty(buffer.size, accumulator)
        wide = self._wide[: buffer.size]
        wide[...] = buffer
        return wide

    def _lost(self, buffer: Any, op: Op) -> Any:
        """The NaN that NCCL's maximum and minimum would lose, and 0 elsewhere; None where it would lose none."""
        return self._cupy.where(self._cupy.isnan(buffer), buffer, 0) if op.keeps_nan(buffer.dtype) else None

    # What NCCL is asked for; `_all_reduce` and `_scatter` are called by `_call`

    def _all_reduce(self, buffer: Any, kind: int, op: int) -> None:
        pointer = buffer.data.ptr
        self._communicator.allReduce(pointer, pointer, buffer.size, kind, op, self._stream.ptr)

    def _scatter(self, buffer: Any, kind: int, op: int) -> None:
        """Equal parts by one call, and what is left over to the last rank, as one launch."""
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
        """As bytes, so of any dtype."""
        part, rest = (count * buffer.itemsize for count in divmod(buffer.size, self.size))
        pointer, end = buffer.data.ptr, buffer.data.ptr + part * self.size
        self._nccl.groupStart()
        if part:
            self._communicator.allGather(pointer + self.rank * part, pointer, part, BYTES, self._stream.ptr)
        if rest:
            self._communicator.broadcast(end, end, rest, BYTES, self.size - 1, self._stream.ptr)
        self._nccl.groupEnd()

    def _call(self, launch: Callable[[Any, int, int], None], buffer: Any, op: Op, result: Any = None) -> None:
        """NCCL, and the mean where it has none.

        result: the part of the array that is finished then; all of it when none is given.
        """
        average = op.scale == 1 / self.size and self._nccl.get_version() >= AVERAGE_VERSION
        launch(buffer, dtypes.TYPES[buffer.dtype].nccl, AVERAGE if average else op.nccl)
        if op.scale is not None and not average:
            result = buffer if result is None else result
            self._cupy.multiply(result, op.scale, out=result)

    def _join_gpus(self) -> None:
        """Make the NCCL communicator on the current device. Collective."""
        cuda = self._cupy.cuda
        self._device = cuda.runtime.getDevice()
        mine = together(self._comm, lambda: _identity(cuda.runtime, self._device))
        raise_together(self._comm, self._shared_gpu(all_values(self._comm, mine, "learn which GPUs the ranks have")))
        unique = together(self._comm, lambda: list(self._nccl.get_unique_id()) if self.rank == 0 else None)
        meeting = _as_cupy_takes_it(self._cupy, root_value(self._comm, unique, "meet in NCCL"))
        error: AllReduceError | None = None
        try:
            self._communicator = self._nccl.NcclCommunicator(self.size, meeting, self.rank)
            self._stream = cuda.Stream(non_blocking=True)
            self._ready = cuda.Event(disable_timing=True)
        except Exception as refused:  # NcclError, and what CuPy raises for codes of NCCL that it does not know
            error = UnavailableError(f"NCCL could not connect {self.size} ranks: {refused}; NCCL_DEBUG=INFO says more")
        raise_together(self._comm, error)

    def _shared_gpu(self, holders: list[str]) -> UnavailableError | None:
        """An error when this rank shares its GPU and this NCCL would not allow it. holders: the ranks' GPUs."""
        sharing = [rank for rank, holder in enumerate(holders) if holder == holders[self.rank]]
        version = self._nccl.get_version()
        allowed = version >= SHARED_GPU_VERSION and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if len(sharing) == 1 or allowed:
            return None
        return UnavailableError(
            f"ranks {sharing} hold the same GPU and NCCL {version // 10000}.{version // 100 % 100} does not allow it; "
            "start one rank per GPU, set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later, or use another backend"
        )

    def _close(self) -> None:
        if self._communicator is not None:
            self._stream.synchronize()
            self._communicator.destroy()
        self._disconnect()

    def abandon(self) -> None:
        """Also what is under way on the GPU is ended, since it may wait there for ranks that never come."""
        super().abandon()
        if self._communicator is not None:
            self._communicator.abort()
        self._disconnect()

    def _disconnect(self) -> None:
        self._communicator = self._stream = self._ready = self._wide = None


def _identity(runtime: Any, device: int) -> str:
    """What two ranks have alike that hold the same GPU, and no others.

    The UUID alone is too little: CuPy cuts it off at its first zero byte. Which machine this is the kernel tells; host
    names may be alike in containers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    uuid = bytes(runtime.getDeviceProperties(device)["uuid"]).hex()
    return f"{machine} {runtime.deviceGetPCIBusId(device)} {uuid}"


def _as_cupy_takes_it(cupy: Any, unique: list[int]) -> bytes | tuple[int, ...]:
    """NCCL's unique id as this rank's CuPy wants it: bytes since 14.0, C's signed chars before."""
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return bytes(number & 255 for number in unique)
    return tuple((number & 255 ^ 128) - 128 for number in unique)


def _missing() -> UnavailableError | None:
    """What this backend lacks here: CuPy, NCCL or a GPU."""
    try:
        cupy = gpu.cupy()
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return UnavailableError('"nccl" needs an NVIDIA GPU and there is none here; use another backend')
    except UnavailableError as error:
        return UnavailableError(f'"nccl" needs CuPy: {error}')
    except Exception as error:  # CuPy without a driver raises errors of its own kinds
        return UnavailableError(f'"nccl" needs an NVIDIA GPU, and CuPy finds none ({error}); use another backend')
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except Exception as error:  # an import error, or CuPy's own when the library can't be loaded
        return UnavailableError(f'"nccl" needs NCCL, which CuPy can\'t load ({error}); {gpu.EXTRA}')
    return None
