"""Reductions of tensors: by the backend of ours that was chosen, or by MPI for dtypes that ours don't know."""

import functools
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import allreduce
from allreduce import notices
from allreduce.arrays import chunks
from allreduce.arrays.workspace import Workspace
from allreduce.base import AllReduce
from allreduce.errors import UnavailableError
from allreduce.messages.agreement import agree, waiting
from allreduce.messages.operations import numpy_operation
from allreduce.topology import Topology
from allreduce.torch_backend import gpu, sparse
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.reduce_ops import MPI_TYPES, Reduction
from allreduce.torch_backend.tensors import as_array, readable, writable
from allreduce.tracing import trace as tracing
from allreduce.tracing.trace import Trace
from allreduce.two_phase import TwoPhase
from allreduce.wrappers.wrapper import Wrapper

LARGEST_COUNT = 1 << 30  # elements in one call of MPI
GENERAL = ("check", "compress", "trace")  # settings that every backend takes


class Reducer:
    """The reductions of one group. Backends are created at their first use; all methods are collective.

    What is called makes sense: module `checks` has seen to it.
    """

    def __init__(self, topology: Topology, comm: MPI.Intracomm, options: Options) -> None:
        self._topology = topology
        self._comm = comm
        self._options = options
        self._backends: dict[str, AllReduce] = {}
        self._trace: Trace | None = None
        self._owns_trace = False
        self._workspace = Workspace()
        self._agreed: set[str] = set()

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce `tensor` in place: afterwards all ranks hold the same bits."""
        if tensor.is_sparse:
            sparse.all_reduce(self.backend(), tensor, reduction)
            return
        if reduction.name is not None and reduction.factor is None and gpu.takes(tensor):
            gpu.reduce(self.backend(), tensor, self._known(reduction))
            self._divide(tensor, reduction)
            return
        with writable(tensor, filled=True) as place:
            self._reduce(place, reduction)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce tensors of one dtype in place, in one call."""
        flat = torch.cat([readable(tensor).reshape(-1) for tensor in tensors])
        self.all_reduce(flat, reduction)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def adasum(self, tensor: torch.Tensor) -> None:
        """Combine a tensor with those of the other ranks, in place; see allreduce/backends/adasum.py."""
        with writable(tensor, filled=True) as place:
            self._made("adasum")(as_array(place), "adasum")

    def reduce(self, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """Reduce into `tensor` of rank `root`; those of the others keep their content."""
        if self._comm.rank == root:
            self.all_reduce(tensor, reduction)
        else:
            self._reduce(readable(tensor).clone(), reduction)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Reduce the r-th of `inputs` into `output` of rank r. A single input stands for equal slices of it."""
        slices = self._slices(inputs)
        mine = slices[self._comm.rank]
        flat = self._gathered(inputs, output.dtype)
        with writable(output) as place:
            equal = len({each.stop - each.start for each in slices}) == 1
            backend = self._scatterer() if equal and reduction.name is not None else None
            if backend is None:
                self._reduce(flat, reduction)
            else:
                self._scale(flat, reduction)
                backend.reduce_scatter(as_array(flat), self._known(reduction))
                self._divide(flat[mine], reduction)
            place.view(-1).copy_(flat[mine])

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
        if reduction.name is not None:
            self.backend()(array, self._known(reduction))
        else:
            assert reduction.mpi is not None
            self._agree(tensor, reduction.mpi)
            for piece in chunks.segments(slice(0, array.size), LARGEST_COUNT):
                part = array[piece]
                operation = _operation(reduction.mpi, array.dtype)
                with waiting(self._comm, f"all_reduce of {tensor.dtype}, MPI.{reduction.mpi}"):
                    self._comm.Allreduce(MPI.IN_PLACE, [part, part.size, MPI_TYPES[tensor.dtype]], operation)
        self._divide(tensor, reduction)

    def _agree(self, tensor: torch.Tensor, op: str) -> None:
        """Compare what the ranks brought the first time, as our backends do for the dtypes that they know."""
        row = f"{tensor.numel()} elements of {tensor.dtype}, MPI.{op}"
        if row not in self._agreed:
            agree(self._comm, [zlib.crc32(row.encode())], row, None)
            self._agreed.add(row)

    def _known(self, reduction: Reduction) -> str:
        assert reduction.name is not None
        return reduction.name

    def _scale(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction.factor is not None:
            factor = reduction.factor
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def _divide(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if not reduction.divide:
            return
        if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # which PyTorch does not divide
            array = as_array(tensor)
            array //= array.dtype.type(self._comm.size)
        else:
            tensor.copy_(torch.div(tensor, self._comm.size, rounding_mode="trunc"))

    def _slices(self, inputs: Sequence[torch.Tensor]) -> list[slice]:
        """Where the ranks' shares are in the inputs, one after another."""
        lengths = [tensor.numel() for tensor in inputs]
        if len(inputs) == 1:
            lengths = [lengths[0] // self._comm.size] * self._comm.size
        return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _gathered(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The inputs one after another in scratch memory, where they may be spoilt."""
        length = sum(tensor.numel() for tensor in inputs)
        raw = self._workspace.array("scattered", length * dtype.itemsize, np.dtype(np.uint8))
        flat = torch.from_numpy(raw).view(dtype)
        torch.cat([readable(tensor).reshape(-1) for tensor in inputs], out=flat)
        return flat

    # Backends

    def backend(self) -> AllReduce:
        """The backend that the user chose, "auto" by default. Collective at its first use."""
        return self._made(self._options.backend)

    def _scatterer(self) -> TwoPhase | None:
        """A backend whose reduce_scatter leaves rank r the r-th of equal slices; None when that can't be had."""
        if self._options.backend != "auto":
            backend = self.backend()
        else:
            backend = self._made("shared" if self._scatters_shared else "ring")
        return backend if _slices_equally(backend) else None  # type: ignore[return-value]

    @functools.cached_property
    def _scatters_shared(self) -> bool:
        """Whether "auto" has a reduce_scatter done in shared memory. Collective at its first use."""
        if self._topology.nodes > 1:
            return False
        try:
            self._made("shared")
        except UnavailableError as error:
            notices.once(self._comm.rank, f'reduce_scatter uses "ring": {error}')
            return False
        return True

    def _made(self, name: str) -> AllReduce:
        """The backend called `name`, with the user's settings. Collective at its first use."""
        if name not in self._backends:
            self._backends[name] = allreduce.create(name, self._topology, **self._settings(name))
        return self._backends[name]

    def _settings(self, name: str) -> dict[str, Any]:
        """The user's settings for a backend: all for the chosen one, the general ones for one that stands in for it.

        All backends of the group share one trace. Collective where that has to be made.
        """
        given = self._options.settings
        settings = {key: given[key] for key in given if name == self._options.backend or key in GENERAL}
        if settings.get("trace") is not None:
            if self._trace is None:
                self._trace, self._owns_trace = tracing.of(settings["trace"], self._topology)
            settings["trace"] = self._trace
        return settings


def _slices_equally(backend: AllReduce) -> bool:
    """Whether rank r owns the r-th of equal slices after the backend's reduce_scatter. The same on all ranks."""
    while isinstance(backend, Wrapper):  # which owns what its inner backend owns
        backend = backend.inner
    return isinstance(backend, TwoPhase) and type(backend).owned is TwoPhase.owned


def _operation(name: str, dtype: np.dtype) -> MPI.Op:
    """MPI's operation; NumPy's for short integers, which Open MPI's vector instructions don't let wrap round."""
    ufunc = {"SUM": np.add, "PROD": np.multiply}.get(name)
    return numpy_operation(ufunc, dtype) if ufunc is not None and dtype.itemsize <= 2 else getattr(MPI, name)
