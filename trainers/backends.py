"""The backend that suits an update: what "auto" means, and which backends can divide the work."""

from typing import Any

import allreduce
from allreduce import notices
from allreduce.backends.auto import Auto
from allreduce.base import AllReduce
from allreduce.errors import OptionError, UnavailableError
from allreduce.topology import Topology
from allreduce.two_phase import TwoPhase

UPDATES = ("replicated", "sharded")


def backend_for(given: str | AllReduce, topology: Topology, update: str) -> AllReduce:
    """The backend for an update, made on `topology` unless one is given. Collective.

    All ranks give the same. "sharded" needs one with two phases, and "auto" names it. Raises OptionError on all.
    """
    if update == "replicated":
        return given if isinstance(given, AllReduce) else allreduce.create(given, topology)
    if given == "auto":
        return _two_phase_auto(topology)
    backend = given if isinstance(given, AllReduce) else allreduce.create(given, topology)
    if isinstance(backend, TwoPhase):
        return backend
    error = OptionError(
        f'update="sharded" needs a backend with reduce_scatter and all_gather, and {backend.name!r} has none; use '
        '"auto", "shared", "ring", "halving_doubling" or "hierarchical_copy"'
    )
    if backend is not given:
        backend.close()
    topology.agree([], 'update="sharded"', error)
    raise error


def used_by(backend: AllReduce, buffer: Any, device: str) -> str:
    """The name of what reduces `buffer`, which is the backend's choice where that is "auto". Local."""
    if isinstance(backend, Auto):
        return backend.choice(len(buffer), buffer.dtype, device)[0]
    return backend.name


def _two_phase_auto(topology: Topology) -> AllReduce:
    """What suits the nodes, and otherwise the ring, which needs nothing but messages."""
    name = "hierarchical_copy" if topology.nodes > 1 else "shared"
    try:
        return allreduce.create(name, topology)
    except UnavailableError as error:
        notices.once(topology.rank, f'the sharded update uses "ring", because "{name}" can\'t be used: {error}')
        return allreduce.create("ring", topology)
