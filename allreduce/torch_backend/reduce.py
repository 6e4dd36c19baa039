"""Reductions of tensors: by the selected backend of allreduce, or by MPI for dtypes that our backends do not take."""

import functools
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.weak import WeakTensorKeyDictionary

import allreduce
from allreduce.arrays import chunks, gpu
from allreduce.arrays import compression as compressions
from allreduce.arrays.arguments import is_integer
from allreduce.arrays.compression import Given, PowerSGD
from allreduce.arrays.memory_kinds import ALLOCATED, GPU, UNREGISTERED
from allreduce.arrays.ops import numpy_operation
from allreduce.arrays.workspace import Workspace
from allreduce.backend import AllReduce
from allreduce.call.call import Call
from allreduce.errors import OptionError, UnknownBackendError
from allreduce.memory.allocations import address
from allreduce.topology import Topology
from allreduce.torch_backend.tensors import as_array, is_plain, numpy_dtype, readable, writable
from allreduce.tracing.trace import Trace
from allreduce.transport.wait import waiting

VARIABLE = "ALLREDUCE_BACKEND"
GENERAL = ("check", "trace")  # settings that every backend takes
COMPRESS_FROM = 1 << 14  # elements
LARGEST_COUNT = 1 << 30  # elements in one call of MPI

# The dtypes that our backends reduce; the part of them that CuPy knows; the dtypes that only the MPI library reduces.
OURS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_CUPYS = tuple(dtype for dtype in OURS if dtype != torch.bfloat16)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # PyTorch does not divide them
_MPIS = (torch.bool, torch.uint8, torch.int8, torch.int16, *_UNSIGNED)
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # a complex number is a pair of these

# The operations of PyTorch's ReduceOps: lower case is an operation of our backends, upper case one of MPI's.
_RED: Any = dist.ReduceOp.RedOpType
_OF_ALL = {_RED.SUM: "sum", _RED.MAX: "max", _RED.MIN: "min", _RED.PRODUCT: "prod"}
_OF_FLOATS = {**_OF_ALL, _RED.AVG: "mean", _RED.PREMUL_SUM: "sum"}
_OF_INTEGERS = {**_OF_ALL, _RED.AVG: "sum", _RED.BAND: "BAND", _RED.BOR: "BOR", _RED.BXOR: "BXOR"}
# MPI sees truth values as bytes 0 and 1: a sum is "or" and a product is "and", as with NCCL.
_OF_BOOLS = {
    **dict.fromkeys((_RED.SUM, _RED.MAX, _RED.BOR), "MAX"),
    **dict.fromkeys((_RED.PRODUCT, _RED.MIN, _RED.BAND), "MIN"),
    _RED.BXOR: "BXOR",
}
_OF_COMPLEX = (_RED.SUM, _RED.AVG, _RED.PREMUL_SUM)


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced.

    op: an operation of ours ("sum") or one of MPI's ("SUM"). factor: each rank's tensor is multiplied by it before
    (PREMUL_SUM). divide: the sum of integers is divided by the number of ranks, towards zero (AVG). compress: as in
    `allreduce.create`; None: the values are exact.
    """

    op: str
    factor: Any = None
    divide: bool = False
    compress: Given = None


def resolve(op: Any, dtype: torch.dtype, sparse: bool = False) -> Reduction:
    """Return the reduction for a ReduceOp (or its RedOpType) on tensors of `dtype`.

    Raises TypeError if the operation is not defined for the dtype, NotImplementedError if it is not offered.
    """
    kind, real = getattr(op, "op", op), _REAL.get(dtype, dtype)
    table = _OF_FLOATS if real.is_floating_point else _OF_BOOLS if dtype == torch.bool else _OF_INTEGERS
    if dtype.is_complex and kind not in _OF_COMPLEX:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    if real not in (*OURS, *_MPIS):
        raise NotImplementedError(f'backend "allreduce" does not reduce {dtype}; convert to a wider dtype first')
    if kind not in table:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    name = table[kind] if real in OURS else table[kind].upper()
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

    backend: one of `allreduce.NAMES`; by default that in ALLREDUCE_BACKEND, else "auto". `new_group` does not
        take over those of the world.
    settings: further arguments of `allreduce.create`. check and trace also apply to reduce_scatter, for which "auto"
        uses "ring" on several nodes. "auto" has measure=False by default: a program gives the same bits in each run.
    overlap: False runs every operation in the calling thread; only messages and monitored_barrier have timeouts then.
    compress: SUM, AVG and PREMUL_SUM of float32 and float64 in all_reduce and the reduce_scatters, from `compress_from`
        elements on (all inputs together), are sent with fewer bits; values as in `allreduce.create`, but no PowerSGD.
        "int8" has error feedback for a tensor that an all_reduce gets again, as DDP's buckets, not in reduce_scatter.
        For large tensors that must be exact use another group.

    Raises UnknownBackendError, OptionError. If the ranks' backends or compressions differ, the creation of the group
    raises DisagreementError on all ranks.
    """

    backend: str = field(default_factory=lambda: os.environ.get(VARIABLE) or "auto")
    settings: dict[str, Any] = field(default_factory=dict)
    overlap: bool = True
    compress: Given = None
    compress_from: int = COMPRESS_FROM

    def __post_init__(self) -> None:
        if "compress" in self.settings:
            raise OptionError("give Options(compress=...), not settings with compress")
        if isinstance(compressions.parse(self.compress), PowerSGD):
            raise OptionError(
                f"compress={compressions.shown(self.compress)}: a process group knows no matrices; use PyTorch's "
                "powerSGD_hook, or trainers.pytorch.MirroredOptimizer"
            )
        if not is_integer(self.compress_from, 0):
            raise OptionError(f"compress_from={self.compress_from!r}: give a number of elements, 0 or more")
        if self.backend not in allreduce.NAMES:
            raise UnknownBackendError(
                f"pg_options or {VARIABLE} names a backend {self.backend!r}; the backends are: "
                + ", ".join(allreduce.NAMES)
            )

    @property
    def shared(self) -> str:
        """The options that must be equal on all ranks, as text."""
        compressed = f", compress={compressions.shown(self.compress)}, compress_from={self.compress_from}"
        return f"Options({self.backend!r}{compressed if self.compress is not None else ''})"

    def resolve(self, op: Any, dtype: torch.dtype, elements: int, sparse: bool = False) -> Reduction:
        """Return the reduction as the function `resolve`, compressed if these options say so. Local."""
        reduction = resolve(op, dtype, sparse)
        long = elements >= self.compress_from
        if long and reduction.op in ("sum", "mean") and dtype in (torch.float32, torch.float64):
            reduction = replace(reduction, compress=self.compress)
        return reduction

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


class Repeated:
    """A tensor that a compressing backend reduces in every step. array: on its memory, registered in the backend.

    The backend keeps its error feedback as long as `array` exists, which does not keep the tensor's memory.
    """

    def __init__(self) -> None:
        self.array: Any = None
        self.met = False

    def register(self, array: Any, backend: AllReduce) -> None:
        """Register the tensor's memory, a 1-D array, in the second call."""
        known = self.array
        if known is None or (address(known), known.size) != (address(array), array.size):
            self.array = None  # unregisters an earlier one
            if self.met:
                self.array = array
                backend.describe(array)
        self.met = True


class TensorReducer:
    """The reductions of one group. It creates other backends at their first use; all methods are collective.

    The callers have checked the arguments (module `checks`, `resolve`), and that all ranks make the same call.
    repeated: what is known of tensors that are compressed. PyTorch owns the memory, and another tensor may get it
        later; a tensor's Python object exists as long as the tensor exists in C++.
    """

    def __init__(self, topology: Topology, comm: MPI.Intracomm, options: Options) -> None:
        self._topology = topology
        self._comm = comm
        self._options = options
        self._backends: dict[str, AllReduce] = {}
        self._trace: Trace | None = None  # of all backends, if the options name a file
        self._workspace = Workspace()
        self.repeated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.main = main = self.backend()

        @functools.lru_cache
        def waits(kind: str, length: int, dtype: torch.dtype, op: str, memories: Sequence[int]) -> bool:
            return any(main.waits_inside_mpi(Call(kind, length, numpy_dtype(dtype), op, each)) for each in memories)

        self._waits_inside_mpi = waits
        self._scatters = _slices_equally(self.main)

    def one_call(self, kind: str, tensor: torch.Tensor, reduction: Reduction) -> tuple[bool, bool]:
        """Return whether an all_reduce or reduce_scatter of a tensor is one call of `main`, in which the ranks compare
        all that must be equal; and, if so, whether a timeout can end its waits: none is inside MPI. Local."""
        plain = reduction.op.islower() and reduction.compress is None and reduction.factor is None
        plain = plain and not (tensor.is_sparse or tensor.is_complex())
        if not (plain and self.main.executor.compares and (self._scatters or kind == "all_reduce")):
            return False, False
        memories = (GPU,) if tensor.is_cuda else (UNREGISTERED, ALLOCATED)
        return True, not self._waits_inside_mpi(kind, tensor.numel(), tensor.dtype, reduction.op, memories)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce `tensor` in place: afterwards all ranks hold the same bits."""
        if tensor.is_sparse:
            sparse_all_reduce(self.backend(), tensor, reduction)
            return
        on_gpu = reduction.op.islower() and _cupy_takes(tensor)  # the same on all ranks, whatever layouts they have
        with writable(tensor, filled=True, on_gpu=on_gpu) as memory, _current_stream(tensor, on_gpu):
            array = _as_cupy(memory) if on_gpu else as_array(memory)
            if reduction.compress is not None:
                repeated = self.repeated.setdefault(tensor, Repeated())
                if is_plain(tensor, on_gpu):
                    repeated.register(array, self.backend(reduction.compress))
            self._reduce(memory, array, reduction)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce tensors of one dtype in place, in one call."""
        flat = torch.cat([readable(tensor).reshape(-1) for tensor in tensors])
        self.all_reduce(flat, reduction)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def adasum(self, tensor: torch.Tensor) -> None:
        """Combine a tensor with those of the other ranks, in place; see allreduce/algorithms/adasum.py."""
        with writable(tensor, filled=True) as memory:
            self.backend(name="adasum")(as_array(memory), "adasum")

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """Reduce into `tensor` of rank `root`; the tensors of the others do not change."""
        self.all_reduce(tensor if self._comm.rank == root else tensor.detach().clone(), reduction)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce inputs[r] of all ranks into rank r's `output`. A single input is split into equal slices."""
        lengths = [tensor.numel() for tensor in inputs]
        if len(inputs) == 1:
            lengths = [lengths[0] // self._comm.size] * self._comm.size
        raw = self._workspace.array("scattered", sum(lengths) * output.itemsize, np.dtype(np.uint8))
        flat = torch.from_numpy(raw).view(output.dtype)
        torch.cat([readable(tensor).reshape(-1) for tensor in inputs], out=flat)
        mine = flat.split(lengths)[self._comm.rank]
        equal = len(set(lengths)) == 1
        backend = self._scatter_backend(reduction.compress) if equal and reduction.op.islower() else None
        with writable(output) as memory:
            if backend is None:
                self._reduce(flat, as_array(flat), reduction)
            else:
                self._scale(flat, reduction)
                backend.reduce_scatter(as_array(flat), reduction.op)
                self._divide(mine, reduction)
            memory.view(-1).copy_(mine)

    def reset(self) -> None:
        """Set the error feedback of all compressions to zero. Local."""
        for backend in self._backends.values():
            backend.reset()

    def close(self) -> None:
        """Close the backends, then the trace. If one can't be closed, the rest is left open."""
        for backend in self._backends.values():
            backend.close()
        if self._trace is not None:
            self._trace.close()
        self._workspace.clear()

    def _reduce(self, tensor: torch.Tensor, array: Any, reduction: Reduction) -> None:
        """Reduce a tensor in plain memory, which is also that of the 1-D array."""
        self._scale(tensor, reduction)
        if reduction.op.islower():
            self.backend(reduction.compress)(array, reduction.op)
        else:
            operation = _mpi_operation(reduction.op, array.dtype)
            for segment in chunks.segments(slice(0, array.size), LARGEST_COUNT):
                with waiting(self._comm, f"all_reduce of {tensor.dtype}, MPI.{reduction.op}"):
                    self._comm.Allreduce(MPI.IN_PLACE, array[segment], operation)
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

    # Backends

    def backend(self, compress: Given = None, name: str = "") -> AllReduce:
        """Return the backend that the options name, or the one called `name`. Collective at its first use.

        The options' settings are those of the backend that they name; other backends get the general ones.
        """
        name = name or self._options.backend
        key = name if compress is None else f"{name}, {compressions.shown(compress)}"
        if key not in self._backends:
            given = self._options.settings
            settings = {key: given[key] for key in given if name == self._options.backend or key in GENERAL}
            if name == "auto":
                settings = {"measure": False, **settings}  # PyTorch's users expect a run's bits to repeat
            trace = settings.get("trace")
            if not (trace is None or isinstance(trace, Trace)):
                self._trace = settings["trace"] = self._trace or Trace(trace, self._topology)
            self._backends[key] = allreduce.create(name, self._topology, compress=compress, **settings)
        return self._backends[key]

    def _scatter_backend(self, compress: Given) -> AllReduce | None:
        """Return a backend whose reduce_scatter gives rank r the r-th of equal slices, or None. Collective once."""
        backend = self.backend(compress)
        if self._options.backend == "auto" and not _slices_equally(backend):
            backend = self.backend(compress, "ring")
        return backend if _slices_equally(backend) else None


def _slices_equally(backend: AllReduce) -> bool:
    """Return whether the backend's reduce_scatter gives rank r the r-th of equal slices. The same on all ranks."""
    ranks = range(backend.size)
    return backend.two_phase and all(backend.owned(backend.size, rank) == slice(rank, rank + 1) for rank in ranks)


def _mpi_operation(name: str, dtype: np.dtype) -> MPI.Op:
    """Return the MPI operation.

    For sums and products of 8- and 16-bit integers it calls NumPy: Open MPI's vectorized ones do not wrap around.
    """
    ufunc = {"SUM": np.add, "PROD": np.multiply}.get(name)
    return numpy_operation(ufunc, dtype) if ufunc is not None and dtype.itemsize <= 2 else getattr(MPI, name)


# CUDA tensors: our backends get them as CuPy arrays where CuPy is installed, and as copies in CPU memory elsewhere


def _cupy_takes(tensor: torch.Tensor) -> bool:
    if not tensor.is_cuda or tensor.dtype not in _CUPYS:
        return False
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True


def _as_cupy(tensor: torch.Tensor) -> Any:
    return gpu.cupy().from_dlpack(tensor).reshape(-1)


def _current_stream(tensor: torch.Tensor, on_gpu: bool) -> ExitStack:
    """Context manager: CuPy works on the device of a CUDA tensor, on PyTorch's current stream."""
    place = ExitStack()
    if on_gpu:
        index = tensor.device.index
        place.enter_context(gpu.cupy().cuda.Device(index))
        place.enter_context(gpu.stream_of(torch.cuda.current_stream(tensor.device), index))
    return place


@torch.no_grad()
def sparse_all_reduce(backend: AllReduce, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Reduce a sparse COO tensor in place. Collective. The result is coalesced, with the same bits on all ranks.

    A rank sends only the entries that it has. The numbers of sparse and dense dimensions must be equal on all ranks.
    """
    shape, entries = tensor.shape[: tensor.sparse_dim()], tensor._nnz()
    strides = torch.tensor([math.prod(shape[at + 1 :]) for at in range(len(shape))], dtype=torch.int64, device="cpu")
    flat = (tensor._indices().cpu() * strides.unsqueeze(1)).sum(0)  # as if the sparse dimensions were one
    values = readable(tensor._values())
    if reduction.factor is not None:
        values = values * reduction.factor
    rows = as_array(values).reshape(entries, math.prod(values.shape[1:]))
    found, sums = backend.sparse(flat.numpy(), rows, math.prod(shape), reduction.op)
    indices = np.stack(np.unravel_index(found, shape)) if shape else np.empty((0, found.size), np.int64)
    whole = torch.empty((found.size, *values.shape[1:]), dtype=values.dtype, device="cpu")
    as_array(whole).reshape(sums.shape)[...] = sums
    if reduction.divide:
        whole = torch.div(whole, backend.size, rounding_mode="trunc")
    tensor.copy_(  # not detach().copy_: a detached sparse tensor has its own entries
        torch.sparse_coo_tensor(
            torch.from_numpy(indices), whole, tensor.shape, device="cpu", is_coalesced=True, check_invariants=False
        ).to(tensor.device)
    )
