"""The backend that suits an update: what "auto" means, and which backends can divide the work."""

from typing import Any

import numpy as np

import allreduce
from allreduce import notices
from allreduce.arrays import dtypes, gpu
from allreduce.backend import AllReduce, TwoPhase
from allreduce.backends.auto import Auto
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from trainers.replica import Replica

UPDATES = ("replicated", "sharded")


def backend_for(
    given: str | AllReduce, topology: Topology, update: str, compress: str | None = None, device: str = "cpu"
) -> AllReduce:
    """The backend for an update, made on `topology` unless one is given. Collective.

    All ranks give the same. "sharded" needs one with two phases, and "auto" names it. compress: of the backend that is
    made. device: of the arrays, "cpu" or "cuda". Raises OptionError on all, and UnavailableError.
    """
    if device == "cuda" and (update == "sharded" or given == "nccl"):
        backend = connected_nccl(given, topology, compress)
        if backend is not None:
            return backend
    if update == "sharded" and given == "auto":
        return _two_phase_auto(topology, compress)
    backend = given if isinstance(given, AllReduce) else allreduce.create(given, topology, compress=compress)
    error = _unfit(backend, update)
    if error is None:
        return backend
    if backend is not given:
        backend.close()
    topology.agree([], f"update={update!r}", error)
    raise error


def _unfit(backend: AllReduce, update: str) -> OptionError | None:
    """Why a backend can't serve an update. Local."""
    if not backend.sums:
        return OptionError(
            f'{backend.name!r} makes no sums of gradients, which training needs; use "auto" or another backend'
        )
    if update == "sharded" and not isinstance(backend, TwoPhase):
        return OptionError(
            f'update="sharded" needs a backend with reduce_scatter and all_gather, and {backend.name!r} has none; use '
            '"auto", "shared", "ring", "halving_doubling" or "hierarchical_copy"'
        )
    return None


def connected_nccl(given: str | AllReduce, topology: Topology, compress: str | None) -> AllReduce | None:
    """The backend "nccl", connected on the GPUs that are current; None where another one is to be used. Collective.

    Made where `given` is "nccl", or "auto" and it works: ranks that share a GPU, say, are found out here and not in the
    first step. Raises UnavailableError on all ranks.
    """
    if topology.size == 1 or given not in ("nccl", "auto"):
        return None
    backend = None
    try:
        backend = allreduce.create("nccl", topology, compress=compress)
        backend.exact(backend.allocate(1), "sum")
        return backend
    except UnavailableError as error:  # raised on all ranks
        if backend is not None:
            backend.close()
        if given == "nccl":
            raise
        notices.once(topology.rank, f'"auto" does without "nccl": {error}')
        return None


def used_by(backend: AllReduce, buffer: Any, device: str) -> str:
    """The name of what reduces `buffer`, which is the backend's choice where that is "auto". Local."""
    if isinstance(backend.exact, Auto):
        return backend.exact.choice(len(buffer), buffer.dtype, device)[0]
    return backend.name


def compression_twice(backend: Any, compress: str | None) -> OptionError | None:
    """Why a backend that is given takes no `compress` from others, if there is one. Local."""
    if compress is None or not isinstance(backend, AllReduce):
        return None
    return OptionError(
        f"compress={compress!r}: {backend!r} is made already; pass its name, or make it with "
        f"allreduce.create({backend.name!r}, topology, compress={compress!r})"
    )


def own_memory(replica: Replica) -> Any:
    """Memory for a replica's gradients when the backend's is given back. Local."""
    if replica.device == "cuda":
        return gpu.cupy().zeros(replica.gradient_length, dtypes.parse(replica.gradient_dtype))
    return np.zeros(replica.gradient_length, dtypes.parse(replica.gradient_dtype))


def _two_phase_auto(topology: Topology, compress: str | None) -> AllReduce:
    """What suits the nodes, and otherwise the ring, which needs nothing but messages."""
    name = "hierarchical_copy" if topology.nodes > 1 else "shared"
    try:
        return allreduce.create(name, topology, compress=compress)
    except UnavailableError as error:
        notices.once(topology.rank, f'the sharded update uses "ring", because "{name}" can\'t be used: {error}')
        return allreduce.create("ring", topology, compress=compress)
