"""The contenders: backends of this library and its peers, each as a function that reduces an array."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

import allreduce
from allreduce.errors import AllReduceError, OptionError
from allreduce.topology import Topology
from allreduce.transport.control import raise_together
from benchmarks.lib.peers import PEERS, Contender


def of_backend(name: str, topology: Topology, op: str, count: int, dtype: np.dtype, compress: str | None) -> Contender:
    """Return a backend as a contender, with an array of `count` elements. Collective. Raises AllReduceError."""
    backend = allreduce.create(name, topology, compress=compress)
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
    optional: Collection[str],
    compress: str | None = None,
) -> tuple[list[Contender], dict[str, str]]:
    """Create the contenders; also returns {name: reason} of those that are left out. Collective.

    names: of backends. count: elements of their arrays. optional: backends and peers that are left out if they don't
    work here or with this dtype; of the others this is an error. compress: as in `allreduce.create`, for all backends.
    """
    makers: dict[str, Callable[[], Contender]] = {
        **{name: partial(of_backend, name, topology, op, count, dtype, compress) for name in names},
        **{name: partial(PEERS[name], topology, op, dtype, count) for name in peers},
    }
    found: list[Contender] = []
    skipped: dict[str, str] = {}
    for name, make in makers.items():
        try:
            found.append(make())
        except AllReduceError as error:
            if name not in optional:
                raise
            skipped[name] = str(error)
    why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    raise_together(topology.world, None if found else OptionError(f"nothing to measure with {dtype}: {why}"))
    return found, skipped
