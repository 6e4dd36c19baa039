"""Reductions of tensors: by the backend of ours that was chosen, or by MPI for dtypes that ours don't know."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import allreduce
from allreduce import chunks, notices
from allreduce.base import AllReduce, TwoPhase
from allreduce.errors import UnavailableError
from allreduce.topology import Topology
from allreduce.torch_backend import gpu
from allreduce.torch_backend.options import Options
from allreduce.torch_backend.reduce_ops import Reduction, resolve
from allreduce.torch_backend.tensors import as_array, readable, writable
from allreduce.workspace import Workspace

LARGEST_COUNT = 1 << 30  # elements in one call of MPI
_MPI_TYPES = {
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


class Reducer:
    """The reductions of one group. Backends are created at their first use; all methods are collective."""

    def __init__(self, topology: Topology, comm: MPI.Intracomm, options: Options) -> None:
        self._topology = topology
        self._comm = comm
        self._options = options
        self._backends: dict[str, AllReduce] = {}
        self._workspace = Workspace()

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce `tensor` in place: afterwards all ranks hold the same bits."""
        reduction = resolve(op, tensor.dtype)
        if reduction.name is not None and reduction.factor is None and gpu.takes(tensor):
            gpu.reduce(self._backend(), tensor, self._known(reduction))
            self._divide(tensor, reduction)
            return
        with writable(tensor, filled=True) as place:
            self._reduce(place, reduction)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce tensors in place, those of a dtype in one call."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([readable(tensor).reshape(-1) for tensor in alike])
            self.all_reduce(flat, op)
            parts = flat.split([tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        """Reduce into `tensor` of rank `root`; those of the others keep their content."""
        if self._comm.rank == root:
            self.all_reduce(tensor, op)
        else:
            self._reduce(readable(tensor).clone(), resolve(op, tensor.dtype))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> None:
        """Reduce the r-th of `inputs` into `output` of rank r. A single input stands for equal slices of it."""
        reduction = resolve(op, output.dtype)
        flat = self._gathered(inputs, output.dtype)
        if flat.numel() != output.numel() * self._comm.size:
            raise ValueError(
                f"reduce_scatter: the output has {output.numel()} elements and there are {self._comm.size} ranks, "
                f"so the input must have {output.numel() * self._comm.size} elements, not {flat.numel()}"
            )
        with writable(output) as place:
            mine = chunks.chunk(flat.numel(), self._comm.size, self._comm.rank)
            backend = None if reduction.name is None else self._scatterer()
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
        self._workspace.clear()

    # Whole tensors in plain memory

    def _reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        self._scale(tensor, reduction)
        array = as_array(tensor)
        if reduction.name is not None:
            self._backend()(array, self._known(reduction))
        else:
            assert reduction.mpi is not None
            for piece in chunks.segments(slice(0, array.size), LARGEST_COUNT):
                part = array[piece]
                self._comm.Allreduce(MPI.IN_PLACE, [part, part.size, _MPI_TYPES[tensor.dtype]], reduction.mpi)
        self._divide(tensor, reduction)

    def _known(self, reduction: Reduction) -> str:
        assert reduction.name is not None
        return reduction.name

    def _scale(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction.factor is not None:
            factor = reduction.factor
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def _divide(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction.divide:
            tensor.copy_(torch.div(tensor, self._comm.size, rounding_mode="trunc"))

    def _gathered(self, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The inputs one after another in scratch memory, where they may be spoilt."""
        length = sum(tensor.numel() for tensor in inputs)
        raw = self._workspace.array("scattered", length * dtype.itemsize, np.dtype(np.uint8))
        flat = torch.from_numpy(raw).view(dtype)
        torch.cat([readable(tensor).reshape(-1) for tensor in inputs], out=flat)
        return flat

    # Backends

    def _backend(self) -> AllReduce:
        """The backend that the user chose, "auto" by default."""
        return self._made(self._options.backend, **self._options.settings)

    def _scatterer(self) -> TwoPhase | None:
        """A backend whose reduce_scatter leaves rank r the r-th of equal slices; None when that can't be had."""
        if self._options.backend == "auto":
            try:
                backend = self._made("shared" if self._topology.nodes == 1 else "ring")
            except UnavailableError as error:
                notices.once(self._comm.rank, f'reduce_scatter uses "ring": {error}')
                backend = self._made("ring")
        else:
            backend = self._backend()
        equal = isinstance(backend, TwoPhase) and type(backend).owned is TwoPhase.owned
        return backend if equal else None  # type: ignore[return-value]

    def _made(self, name: str, **settings: Any) -> AllReduce:
        if name not in self._backends:
            self._backends[name] = allreduce.create(name, self._topology, **settings)
        return self._backends[name]
