"""The contenders: backends of this library and other software ("peers"), each as a function that reduces an array.

A peer is a function from (topology, op, dtype) to a Contender; a new one is one function and one line in PEERS.
"""

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import allreduce
from allreduce.arrays import dtypes, ops
from allreduce.backend import AllReduce
from allreduce.errors import AllReduceError, OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import all_values, on_all_ranks, raise_together, together


@dataclass
class Contender:
    """A contender. call: reduces a 1-D array in place. array: from its allocate(); None if it has none."""

    name: str
    call: Callable[[np.ndarray], None]
    array: np.ndarray | None = None
    close: Callable[[], Any] = bool  # collective


def of_backend(backend: AllReduce, op: str, count: int, dtype: np.dtype) -> Contender:
    """Return a backend as a contender, with an array of `count` elements. Collective. Raises the errors of allocate."""
    try:
        array = backend.allocate(count, dtype, device="cpu")
    except AllReduceError:
        backend.close()
        raise
    return Contender(backend.name, partial(backend, op=op), array, backend.close)


def gather(
    topology: Topology,
    names: Sequence[str],
    peers: Sequence[str],
    count: int,
    dtype: np.dtype,
    op: str,
    *,
    optional: bool,
    compress: str | None = None,
) -> tuple[list[Contender], dict[str, str]]:
    """Create the contenders; also returns {name: reason} of those that are left out. Collective.

    names: of backends. count: elements of their arrays. optional: leave out backends that don't work here or with this
    dtype; else they are errors. compress: as in `allreduce.create`, for all backends.
    """
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            found.append(of_backend(allreduce.create(name, topology, compress=compress), op, count, dtype))
        except AllReduceError as error:
            if not optional:
                raise
            skipped[name] = str(error)
    found += [PEERS[name](topology, op, dtype) for name in peers]
    why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise_together(topology.world, None if found else OptionError(f"nothing to measure with {dtype}: {why}"))
    return found, skipped


TIMEOUT = datetime.timedelta(seconds=60)


def mpi4py(topology: Topology, op: str, dtype: np.dtype) -> Contender:
    """The bare call of mpi4py, comm.Allreduce(IN_PLACE, array): the cost of Python and MPI without this library."""
    if dtypes.is_half(dtype):
        raise on_all_ranks(OptionError(f"mpi4py can't take part: MPI has no {dtype}"), topology.world)
    comm = topology.private()
    plain = ops.OPS["sum" if op == "mean" else op].mpi
    scale = 1 / comm.size if op == "mean" else None

    def call(array: np.ndarray) -> None:
        comm.Allreduce(MPI.IN_PLACE, array, plain)
        if scale is not None:
            np.multiply(array, scale, out=array)

    return Contender("mpi4py", call, close=lambda: topology.release(comm))


def gloo(topology: Topology, op: str, dtype: np.dtype) -> Contender:
    """torch.distributed with gloo in the same processes, as PyTorch's DDP uses it on CPUs."""
    torch = together(topology.world, _import_torch)
    distributed = torch.distributed
    join(distributed, topology)
    names = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}
    torch_op = getattr(distributed.ReduceOp, names[op])
    tensors: dict[tuple[int, int, np.dtype], Any] = {}  # DDP keeps its tensors too

    def call(array: np.ndarray) -> None:
        key = (array.ctypes.data, array.size, array.dtype)
        tensor = tensors.get(key)
        if tensor is None:
            tensor = tensors[key] = _tensor(torch, array)
        distributed.all_reduce(tensor, op=torch_op)
        if op == "mean":
            tensor.div_(topology.size)

    return Contender("gloo", call, close=distributed.destroy_process_group)


PEERS: dict[str, Callable[[Topology, str, np.dtype], Contender]] = {"gloo": gloo, "mpi4py": mpi4py}


def _import_torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as missing:
        problem = f'which can\'t be imported ({missing}); pip install ".[torch]" in the checkout'
        raise UnavailableError(f"--peers gloo needs PyTorch, {problem}") from None
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise UnavailableError("--peers gloo: this PyTorch was built without gloo; install another build")
    return torch


def join(distributed: Any, topology: Topology) -> None:
    """Make all ranks one process group, or raise the same error on all of them. Collective."""
    from allreduce.torch_backend.rendezvous import store_of_rank_0

    store = store_of_rank_0(topology, TIMEOUT)
    if len(set(all_values(topology.world, socket.gethostname(), "exchange the address for gloo"))) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names often do not resolve in containers
    error = None
    try:
        distributed.init_process_group(
            "gloo", store=store, rank=topology.rank, world_size=topology.size, timeout=TIMEOUT
        )
    except (OSError, RuntimeError, ValueError) as failed:
        place = "GLOO_SOCKET_IFNAME names the network interface to use"
        error = UnavailableError(f"--peers gloo can't connect the ranks: {failed}; {place}")
    raise_together(topology.world, error)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    """Return a tensor in the memory of an array."""
    if array.dtype == dtypes.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
