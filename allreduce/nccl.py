"""NCCL: NVIDIA's collectives on CuPy arrays, through CuPy's binding. Steps and bytes are NCCL's own."""

import os
from typing import Any

import numpy as np

from allreduce import dtypes, gpu
from allreduce.base import AllReduce
from allreduce.errors import AllReduceError, UnavailableError, raise_together
from allreduce.ops import Op
from allreduce.topology import Topology

AVERAGE = 4  # ncclAvg in nccl.h, since NCCL 2.10
AVERAGE_VERSION = 21000
SHARED_GPU_VERSION = 23000  # since 2.30, NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU


class Nccl(AllReduce):
    """One GPU a rank: the current device, or the one of this node rank when none was chosen.

    Arrays in ordinary memory are copied to the GPU and back. The NCCL communicator is made at the first
    use, because it binds the device that is current then.
    """

    def __init__(self, topology: Topology, *, check: str = "first") -> None:
        raise_together(topology.world, _missing())
        super().__init__(topology, check=check)
        self._cupy = gpu.cupy()
        self._nccl = self._cupy.cuda.nccl
        self._communicator: Any = None
        self._stream: Any = None

    def _allocate(self, length: int, dtype: np.dtype, device: str | None) -> Any:
        if device == "cpu":
            return np.zeros(length, dtype)
        self._choose_device()
        return self._cupy.zeros(length, dtype)

    def _reduce(self, buffer: np.ndarray, op: Op) -> None:
        self._choose_device()
        staged = self._cupy.asarray(buffer)
        self._reduce_gpu(staged, op)
        staged.get(out=buffer)

    def _reduce_gpu(self, buffer: Any, op: Op) -> None:
        if self._communicator is None:
            self._connect()
        average = op.scale is not None and self._nccl.get_version() >= AVERAGE_VERSION
        ready = self._cupy.cuda.get_current_stream().record()
        self._stream.wait_event(ready)  # the array may still be written on the caller's stream
        with self._stream:
            self._communicator.allReduce(
                buffer.data.ptr,
                buffer.data.ptr,
                buffer.size,
                dtypes.TYPES[buffer.dtype].nccl,
                AVERAGE if average else op.nccl,
                self._stream.ptr,
            )
            if op.scale is not None and not average:
                self._cupy.multiply(buffer, op.scale, out=buffer)
            done = self._stream.record()
        self._cupy.cuda.get_current_stream().wait_event(done)

    def _choose_device(self) -> None:
        """Ranks of a node take its GPUs in turn, unless the program has chosen one."""
        runtime = self._cupy.cuda.runtime
        if runtime.getDevice() == 0:
            self._cupy.cuda.Device(self.topology.node_rank % runtime.getDeviceCount()).use()

    def _connect(self) -> None:
        """Make the NCCL communicator on the current device. Collective."""
        raise_together(self._comm, self._shared_gpu())
        unique = self._comm.bcast(self._nccl.get_unique_id() if self.rank == 0 else None)
        error: AllReduceError | None = None
        try:
            self._communicator = self._nccl.NcclCommunicator(self.size, unique, self.rank)
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        except self._nccl.NcclError as refused:
            error = UnavailableError(f"NCCL could not connect {self.size} ranks: {refused}; NCCL_DEBUG=INFO says more")
        raise_together(self._comm, error)

    def _shared_gpu(self) -> UnavailableError | None:
        """An error when ranks share a GPU and this NCCL would not allow it. Collective."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._cupy.cuda.runtime.getDevice())
        holders = self._comm.allgather(bytes(properties["uuid"]).hex())
        sharing = [rank for rank, uuid in enumerate(holders) if uuid == holders[self.rank]]
        if len(sharing) == 1:
            return None
        version = self._nccl.get_version()
        if version >= SHARED_GPU_VERSION and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return None
        return UnavailableError(
            f"ranks {sharing} hold the same GPU and NCCL {version // 10000}.{version // 100 % 100} does not allow it; "
            "start one rank per GPU, set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later, or use another backend"
        )

    def _close(self) -> None:
        if self._communicator is not None:
            self._stream.synchronize()
            self._communicator.destroy()
            self._communicator = self._stream = None


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
