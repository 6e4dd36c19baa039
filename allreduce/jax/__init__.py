"""Collectives on trees of JAX arrays: outside `jit`, inside `jit`, and through derivatives.

    grads = allreduce.jax.pmean(grads, reduce)  # the mean over all ranks: a new tree

Collectives are an ordered effect of JAX: a process runs them one after the other in program order, compiled or not. So
ranks that run the same program make the same calls. Direct calls of the backend (`reduce(array)`) are not part of that
order: call jax.effects_barrier() before them.

The modules: the record of a collective and the table of its kinds (collective.py), the primitive (primitive.py).
"""

from typing import Any

from allreduce.backend import AllReduce
from allreduce.jax.primitive import call, named_errors

__all__ = [
    "all_gather",
    "broadcast",
    "named_errors",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "psum_scatter",
]


def pmean(tree: Any, backend: AllReduce) -> Any:
    """Return the mean over all ranks of each array of a tree (floating dtypes), as a new tree. Collective.

    The gradient is the mean of the ranks' gradients.
    """
    return call(tree, backend, "pmean", op="mean")


def psum(tree: Any, backend: AllReduce) -> Any:
    """Return the sum over all ranks of each array of a tree. Collective. The gradient is the ranks' sum, too."""
    return call(tree, backend, "psum")


def pmax(tree: Any, backend: AllReduce) -> Any:
    """Return the maximum over all ranks of each array of a tree. Collective. No derivative: UnsupportedOpError."""
    return call(tree, backend, "pmax", op="max")


def pmin(tree: Any, backend: AllReduce) -> Any:
    """Return the minimum over all ranks of each array of a tree. Collective. No derivative: UnsupportedOpError."""
    return call(tree, backend, "pmin", op="min")


def psum_scatter(tree: Any, backend: AllReduce) -> Any:
    """Return this rank's row of the sums over all ranks: a reduce-scatter. Collective.

    tree: of arrays of shape (size, ...). A result has the shape (...): row r, summed over all ranks, on rank r.
    Raises OptionError for another first axis. The gradient is the `all_gather` of the ranks' gradients.
    """
    return call(tree, backend, "psum_scatter")


def all_gather(tree: Any, backend: AllReduce) -> Any:
    """Stack each array of a tree over all ranks: shape (size, *shape). Collective.

    tree: of arrays of any dtype; of PRNG keys pass jax.random.key_data(key). The gradient is this rank's slice of the
    sum of the ranks' gradients.
    """
    return call(tree, backend, "all_gather")


def broadcast(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """Return rank `root`'s arrays. Collective. Raises OptionError for an invalid root.

    tree: see `all_gather`. The gradient is the sum of the ranks' gradients on `root`, zero elsewhere.
    """
    return call(tree, backend, "broadcast", root=root)
