"""Selects the backend for an update: the meaning of "auto", and the checks of a given backend."""

from typing import Any

import numpy as np

import allreduce
from allreduce import algorithms, notices
from allreduce.arrays import dtypes, gpu
from allreduce.arrays.compression import Given
from allreduce.backend import AllReduce, Config
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.transport.control import combine, on_all
from trainers.replica import Replica, attach

# A training that is repeated or resumed gives the same bits, so "auto" measures nothing that could change them.
SETTINGS_OF_AUTO = {"measure": False}


def backend_for(
    given: str | AllReduce | Config,
    topology: Topology,
    update: str,
    compress: Given = None,
    device: str = "cpu",
    exact: bool = False,
) -> AllReduce:
    """Return `given` if it is a backend, else create the backend of that name on `topology`, checked for the update.
    Collective.

    given: a name or a backend, the same on all ranks; or the Config of one, which is created again. update: "sharded"
        needs a backend with two phases. compress, exact: options of the backend that is created. device: of the arrays,
        "cpu" or "cuda". Raises OptionError or UnavailableError on all ranks.
    """
    if isinstance(given, Config):
        return allreduce.create(given.name, topology, **given.options)
    if device == "cuda" and (update == "sharded" or given == "nccl"):
        backend = connected_nccl(given, topology, compress)
        if backend is not None:
            return backend
    if isinstance(given, AllReduce):
        backend = given
    else:
        options: dict[str, Any] = SETTINGS_OF_AUTO if given == "auto" and not exact else {}
        backend = allreduce.create(given, topology, compress=compress, exact=exact, **options)
    error = _backend_error(backend, update) or _error_of_slices(backend, update)
    if error is None:
        return backend
    if backend is not given:
        backend.close()
    topology.agree([], f"update={update!r}", error)
    raise error


def _backend_error(backend: AllReduce, update: str) -> OptionError | None:
    """Return the error if a backend can't be used for an update, or None. Local."""
    if not backend.sums:
        return OptionError(
            f'{backend.name!r} does not sum gradients, which training needs; use "auto" or another backend'
        )
    if update == "sharded" and not backend.two_phase:
        names = ", ".join(f'"{name}"' for name in algorithms.two_phase())
        return OptionError(
            f'update="sharded" needs a backend with reduce_scatter and all_gather, and {backend.name!r} has none; '
            f'give the name "auto", or one of {names}'
        )
    return None


def _error_of_slices(backend: AllReduce, update: str) -> OptionError | None:
    """Return the error if a rank would update elements that another rank updates too, or None. Collective; the result
    is the same on all ranks.

    The ranks of each node, or all ranks together, must own every element once.
    """
    if update != "sharded":
        return None
    topology, owners = backend.topology, np.zeros(backend.size + 1, np.int64)
    owners[backend.owned(owners.size)] = 1
    by_node, by_all = (
        bool((combine(comm, owners.copy(), "count the owners of elements") == 1).all())
        for comm in (topology.node, topology.world)
    )
    if on_all(topology.world, by_node, "count the owners of elements") or by_all:
        return None
    return OptionError(
        f'update="sharded" can\'t use {backend.name!r}: its `owned(length)` gives elements to several ranks, or '
        "to none; each must have one owner, of all ranks or on each node"
    )


def connected_nccl(given: str | AllReduce, topology: Topology, compress: Given) -> AllReduce | None:
    """Create the backend "nccl" on the current GPUs and test it; returns None if another backend is to be used.
    Collective.

    given: if NCCL does not work, "nccl" raises UnavailableError on all ranks, and "auto" returns None. The test
        detects ranks that share a GPU, before the first step.
    """
    if topology.size == 1 or given not in ("nccl", "auto"):
        return None
    backend = None
    try:
        backend = allreduce.create("nccl", topology, compress=compress)
        backend(backend.allocate(1), "sum", lossless=True)
        return backend
    except UnavailableError as error:  # raised on all ranks
        if backend is not None:
            backend.close()
        if given == "nccl":
            raise
        notices.once(topology.rank, f'"auto" does not use "nccl": {error}')
        return None


def compress_error(backend: Any, compress: Given) -> OptionError | None:
    """Return the error if `compress` is given together with a backend instance, or None. Local."""
    if compress is None or not isinstance(backend, AllReduce):
        return None
    return OptionError(
        f"compress={compress!r}: {backend!r} exists already; pass its name, or create it with "
        f"allreduce.create({backend.name!r}, topology, compress={compress!r})"
    )


def exact_error(backend: Any, compress: Given) -> str:
    """Return why an exact training can't use these, as text; "" if it can. Local."""
    if compress is not None:
        return f"Exact and compress={compress!r} exclude each other; leave one out"
    sums = getattr(backend, "sums_terms", False) or (isinstance(backend, Config) and backend.options.get("exact"))
    if isinstance(backend, AllReduce | Config) and not sums:
        return (
            f"Exact: {backend!r} does not sum exactly; pass its name, or create it with "
            f"allreduce.create({backend.name!r}, topology, exact=True)"
        )
    return ""


def bind_own(replica: Replica, gradients: Any = None) -> None:
    """Bind a replica to these gradients, or its own, and its parameters to memory of their own. Local."""
    attach(
        replica,
        None if replica.keeps_memory else allocate_own(replica),
        allocate_own(replica) if gradients is None else gradients,
    )


def allocate_own(replica: Replica) -> Any:
    """Allocate memory for a replica's gradients or parameters that belongs to no backend, on its device. Local."""
    if replica.device == "cuda":
        return gpu.cupy().zeros(replica.gradient_length, dtypes.parse(replica.gradient_dtype))
    return np.zeros(replica.gradient_length, dtypes.parse(replica.gradient_dtype))
