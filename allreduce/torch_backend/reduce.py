"""Reductions of tensors: by the selected backend of allreduce, or by MPI for dtypes that our backends do not take."""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import allreduce
from allreduce import notices
from allreduce.arrays import chunks, gpu
from allreduce.arrays.workspace import Workspace
from allreduce.backend import AllReduce, TwoPhase
from allreduce.errors import UnavailableError, UnknownBackendError
from allreduce.topology import Topology
from allreduce.torch_backend.tensors import as_array, readable, writable
from allreduce.tracing import trace as tracing
from allreduce.tracing.trace import Trace
from allreduce.transport.operations import numpy_operation
from allreduce.transport.wait import waiting
from allreduce.wrappers.wrapper import Wrapper

VARIABLE = "ALLREDUCE_BACKEND"
GENERAL = ("check", "compress", "trace")  # settings that every backend takes
LARGEST_COUNT = 1 << 30  # elements in one call of MPI

# The dtypes that our backends reduce, those of them that CuPy knows, and those that the MPI library reduces.
OURS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_CUPYS = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
_MPIS = {
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # PyTorch does not divide them
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # a complex number is a pair of these

# The operations of PyTorch's ReduceOps: lower case is an operation of our backends, upper case one of MPI's.
_RED: Any = dist.ReduceOp.RedOpType
_OF_FLOATS = {
    _RED.SUM: "sum",
    _RED.AVG: "mean",
    _RED.MAX: "max",
    _RED.MIN: "min",
    _RED.PRODUCT: "prod",
    _RED.PREMUL_SUM: "sum",
}
_OF_INTEGERS = {
    _RED.SUM: "SUM",
    _RED.AVG: "SUM",
    _RED.MAX: "MAX",
    _RED.MIN: "MIN",
    _RED.PRODUCT: "PROD",
    _RED.BAND: "BAND",
    _RED.BOR: "BOR",
    _RED.BXOR: "BXOR",
}
# MPI sees truth values as bytes 0 and 1: a sum is "or" and a product is "and", as with NCCL.
_OF_BOOLS = {
    _RED.SUM: "MAX",
    _RED.MAX: "MAX",
    _RED.BOR: "MAX",
    _RED.PRODUCT: "MIN",
    _RED.MIN: "MIN",
    _RED.BAND: "MIN",
    _RED.BXOR: "BXOR",
}
_OF_COMPLEX = (_RED.SUM, _RED.AVG, _RED.PREMUL_SUM)


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced.

    op: an operation of ours ("sum") or one of MPI's ("SUM"). factor: each rank's tensor is multiplied by it before
    (PREMUL_SUM). divide: the sum of integers is divided by the number of ranks, towards zero (AVG).
    """

    op: str
    factor: Any = None
    divide: bool = False


def resolve(op: Any, dtype: torch.dtype, sparse: bool = False) -> Reduction:
    """Return the reduction for a ReduceOp (or its RedOpType) on tensors of `dtype`.

    Raises TypeError if the operation is not defined for the dtype, NotImplementedError if it is not offered.
    """
    kind, real = getattr(op, "op", op), _REAL.get(dtype, dtype)
    table = _OF_FLOATS if real.is_floating_point else _OF_BOOLS if dtype == torch.bool else _OF_INTEGERS
    if dtype.is_complex and kind not in _OF_COMPLEX:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    if real not in (OURS if real.is_floating_point else _MPIS):
        raise NotImplementedError(f'backend "allreduce" does not reduce {dtype}; convert to a wider dtype first')
    if kind not in table:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    name = table[kind]
    if real in OURS and name.lower() in _OF_FLOATS.values():
        name = name.lower()
    if sparse and (name not in ("sum", "mean") or dtype.is_complex):
        raise NotImplementedError(
            f'all_reduce of backend "allreduce" takes sparse tensors of floats and of 32 and 64-bit integers with '
            f"SUM and AVG; convert this one of {dtype} with to_dense()"
        )
    factor = op.__getstate__()[1] if kind == _RED.PREMUL_SUM else None
    return Reduction(name, factor, divide=not real.is_floating_point and kind == _RED.AVG)


@dataclass(frozen=True)
class Options:
    """Options of the process group, for `init_process_group("allreduce", pg_options=Options("ring"))` and `new_group`.

    backend: one of `allreduce.NAMES`; by default the one in the environment variable ALLREDUCE_BACKEND,
        else "auto". new_group does not inherit the world's options; without pg_options it uses the same default.
    settings: further arguments of `allreduce.create` (check="always", cross="ring", ...). check, compress and trace
        also apply to reduce_scatter, for which "auto" uses "shared" or "ring". "auto" has trial="same_bits" by default:
        the same program gives the same bits in each run.
    overlap: False runs every operation in the calling thread, before the call returns; then only messages and
        monitored_barrier have timeouts.

    Raises UnknownBackendError.
    """

    backend: str = field(default_factory=lambda: os.environ.get(VARIABLE) or "auto")
    settings: dict[str, Any] = field(default_factory=dict)
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.backend not in allreduce.NAMES:
            raise UnknownBackendError(
                f"pg_options or {VARIABLE} names a backend {self.backend!r}; the backends are: "
                + ", ".join(allreduce.NAMES)
            )

    @classmethod
    def parse(cls, given: object) -> "Options":
        """Convert pg_options (Options, a backend's name, or None) to Options. Raises TypeError."""
        if given is None:
            return cls()
        if isinstance(given, str):
            return cls(given)
        if isinstance(given, cls):
            return given
        raise TypeError(
            'pg_options of backend "allreduce" are allreduce.torch_backend.Options or the name of a backend '
            f'("ring"), not {type(given).__name__}'
        )


class TensorReducer:
    """The reductions of one group. It creates a backend at its first use; all methods are collective.

    The callers have checked the arguments (module `checks`, `resolve`), and that all ranks make the same call.
    """

    def __init__(self, topology: Topology, comm: MPI.Intracomm, options: Options) -> None:
        self._topology = topology
        self._comm = comm
        self._options = options
        self._backends: dict[str, AllReduce] = {}
        self._trace: Trace | None = None
        self._owns_trace = False
        self._workspace = Workspace()

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce `tensor` in place: afterwards all ranks hold the same bits."""
        if tensor.is_sparse:
            sparse_all_reduce(self.backend(), tensor, reduction)
        elif reduction.op.islower() and reduction.factor is None and _cupy_takes(tensor):
            _cupy_reduce(self.backend(), tensor, reduction.op)
            self._divide(tensor, reduction)
        else:
            with writable(tensor, filled=True) as memory:
                self._reduce(memory, reduction)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce tensors of one dtype in place, in one call."""
        flat = torch.cat([readable(tensor).reshape(-1) for tensor in tensors])
        self.all_reduce(flat, reduction)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def adasum(self, tensor: torch.Tensor) -> None:
        """Combine a tensor with those of the other ranks, in place; see allreduce/backends/adasum.py."""
        with writable(tensor, filled=True) as memory:
            self._get_backend("adasum")(as_array(memory), "adasum")

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """Reduce into `tensor` of rank `root`; the tensors of the others do not change."""
        if self._comm.rank == root:
            self.all_reduce(tensor, reduction)
        else:
            self._reduce(readable(tensor).clone(), reduction)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce inputs[r] of all ranks into rank r's `output`. A single input is split into equal slices."""
        lengths = [tensor.numel() for tensor in inputs]
        if len(inputs) == 1:
            lengths = [lengths[0] // self._comm.size] * self._comm.size
        end = list(accumulate(lengths))[self._comm.rank]
        flat = self._concatenated(inputs, output.dtype)
        mine = flat[end - lengths[self._comm.rank] : end]
        with writable(output) as memory:
            backend = self._scatter_backend() if len(set(lengths)) == 1 and reduction.op.islower() else None
            if backend is None:
                self._reduce(flat, reduction)
            else:
                self._scale(flat, reduction)
                backend.reduce_scatter(as_array(flat), reduction.op)
                self._divide(mine, reduction)
            memory.view(-1).copy_(mine)

    def close(self) -> None:
        """Close the backends."""
        for backend in self._backends.values():
            backend.close()
        if self._trace is not None and self._owns_trace:
            self._trace.close()
        self._workspace.clear()

    # Whole tensors in plain memory

    def _reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        self._scale(tensor, reduction)
        array = as_array(tensor)
        if reduction.op.islower():
            self.backend()(array, reduction.op)
        else:
            operation = _mpi_operation(reduction.op, array.dtype)
            for segment in chunks.segments(slice(0, array.size), LARGEST_COUNT):
                part = array[segment]
                with waiting(self._comm, f"all_reduce of {tensor.dtype}, MPI.{reduction.op}"):
                    self._comm.Allreduce(MPI.IN_PLACE, [part, part.size, _MPIS[tensor.dtype]], operation)
        self._divide(tensor, reduction)

    def _scale(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction.factor is not None:
            factor = reduction.factor
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def _divide(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if not reduction.divide:
            return
        if tensor.dtype in _UNSIGNED:
            array = as_array(tensor)
            array //= array.dtype.type(self._comm.size)
        else:
            tensor.copy_(torch.div(tensor, self._comm.size, rounding_mode="trunc"))

    def _concatenated(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Concatenate the inputs in scratch memory."""
        length = sum(tensor.numel() for tensor in inputs)
        raw = self._workspace.array("scattered", length * dtype.itemsize, np.dtype(np.uint8))
        flat = torch.from_numpy(raw).view(dtype)
        torch.cat([readable(tensor).reshape(-1) for tensor in inputs], out=flat)
        return flat

    # Backends

    def backend(self) -> AllReduce:
        """Return the backend that the options name. Collective at its first use."""
        return self._get_backend(self._options.backend)

    def _scatter_backend(self) -> TwoPhase | None:
        """Return a backend whose reduce_scatter gives rank r the r-th of equal slices, or None. Collective once."""
        if self._options.backend != "auto":
            backend = self.backend()
        else:
            backend = self._get_backend("shared" if self._scatters_shared else "ring")
        return backend if _slices_equally(backend) else None  # type: ignore[return-value]

    @functools.cached_property
    def _scatters_shared(self) -> bool:
        """True: reduce_scatter uses "shared" under "auto". Collective at its first use."""
        if self._topology.nodes > 1:
            return False
        try:
            self._get_backend("shared")
        except UnavailableError as error:
            notices.once(self._comm.rank, f'reduce_scatter uses "ring": {error}')
            return False
        return True

    def _get_backend(self, name: str) -> AllReduce:
        """Return the backend called `name`, with the user's settings. Collective at its first use."""
        if name not in self._backends:
            self._backends[name] = allreduce.create(name, self._topology, **self._settings(name))
        return self._backends[name]

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the settings for a backend: all settings for the selected one, the general ones for any other.

        All backends of the group share one trace. Collective when the trace is created.
        """
        given = self._options.settings
        settings = {key: given[key] for key in given if name == self._options.backend or key in GENERAL}
        if name == "auto":
            settings = {"trial": "same_bits", **settings}  # PyTorch's users expect a run's bits to repeat
        if settings.get("trace") is not None:
            if self._trace is None:
                self._trace, self._owns_trace = tracing.of(settings["trace"], self._topology)
            settings["trace"] = self._trace
        return settings


def _slices_equally(backend: AllReduce) -> bool:
    """Return whether the backend's reduce_scatter gives rank r the r-th of equal slices. The same on all ranks."""
    while isinstance(backend, Wrapper):  # a wrapper owns the slices that its inner backend owns
        backend = backend.inner
    return isinstance(backend, TwoPhase) and type(backend).owned is TwoPhase.owned


def _mpi_operation(name: str, dtype: np.dtype) -> MPI.Op:
    """Return the MPI operation.

    For sums and products of 8- and 16-bit integers it calls NumPy: Open MPI's vectorized ones do not wrap around.
    """
    ufunc = {"SUM": np.add, "PROD": np.multiply}.get(name)
    return numpy_operation(ufunc, dtype) if ufunc is not None and dtype.itemsize <= 2 else getattr(MPI, name)


# CUDA tensors: our backends get them as CuPy arrays where CuPy is installed, and as copies in CPU memory elsewhere


def _cupy_takes(tensor: torch.Tensor) -> bool:
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype not in _CUPYS:
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True


def _cupy_reduce(backend: AllReduce, tensor: torch.Tensor, op: str) -> None:
    """Reduce a CUDA tensor in place, on PyTorch's current stream."""
    import cupy

    index = tensor.device.index
    with cupy.cuda.Device(index), gpu.stream_of(torch.cuda.current_stream(tensor.device), index):
        backend(cupy.from_dlpack(tensor.detach()), op)


@torch.no_grad()
def sparse_all_reduce(backend: AllReduce, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Reduce a sparse COO tensor in place. Collective. The result is coalesced, with the same bits on all ranks.

    A rank sends only the entries that it has. The numbers of sparse and dense dimensions must be equal on all ranks.
    """
    shape, entries = tensor.shape[: tensor.sparse_dim()], tensor._nnz()
    strides = torch.tensor([math.prod(shape[at + 1 :]) for at in range(len(shape))], dtype=torch.int64)
    flat = (tensor._indices().cpu() * strides.unsqueeze(1)).sum(0)  # as if the sparse dimensions were one
    values = readable(tensor._values())
    if reduction.factor is not None:
        values = values * reduction.factor
    rows = as_array(values).reshape(entries, math.prod(values.shape[1:]))
    found, sums = backend.sparse(flat.numpy(), rows, math.prod(shape), reduction.op)
    if reduction.divide:
        sums = np.trunc(sums / backend.size).astype(sums.dtype)
    indices = np.stack(np.unravel_index(found, shape)) if shape else np.empty((0, found.size), np.int64)
    whole = torch.empty((found.size, *values.shape[1:]), dtype=values.dtype)
    as_array(whole).reshape(sums.shape)[...] = sums
    tensor.copy_(  # not detach().copy_: a detached sparse tensor has its own entries
        torch.sparse_coo_tensor(
            torch.from_numpy(indices), whole, tensor.shape, is_coalesced=True, check_invariants=False
        ).to(tensor.device)
    )
