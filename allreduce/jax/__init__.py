"""Collectives on trees of JAX arrays: outside `jit`, inside `jit`, and through derivatives.

    grads = allreduce.jax.pmean(grads, reduce)  # the mean over all ranks: a new tree

Collectives are an ordered effect of JAX: a process runs them one after the other in program order, compiled or not. So
ranks that run the same program make the same calls. Direct calls of the backend (`reduce(array)`) are not part of that
order: call jax.effects_barrier() before them.

The modules: the record of a collective and the table of its kinds (collective.py), the primitive (primitive.py).
"""

from collections.abc import Iterable
from typing import Any

from allreduce.backend import AllReduce
from allreduce.errors import UnsupportedOpError
from allreduce.jax.primitive import call, named_errors

__all__ = [
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "named_errors",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "scan",
    "scatter",
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


def scan(tree: Any, backend: AllReduce, op: str = "sum") -> Any:
    """Return the sum over the ranks 0 to this one of each array of a tree, as MPI_Scan. Collective.

    op: "sum", "prod", "max" or "min". The gradient of a sum is the sum of the gradients of this rank and those behind;
    other ops have no derivative: UnsupportedOpError. 16-bit floats are summed in float32 and rounded once.
    """
    if op not in ("sum", "prod", "max", "min"):
        raise UnsupportedOpError(f'scan takes the op "sum", "prod", "max" or "min", not {op!r}')
    return call(tree, backend, "scan", f"scan by {op}", op=op)


def all_gather(tree: Any, backend: AllReduce) -> Any:
    """Stack each array of a tree over all ranks: shape (size, *shape). Collective.

    tree: of arrays of any dtype, PRNG keys too. The gradient is this rank's slice of the sum of the ranks' gradients.
    """
    return call(tree, backend, "all_gather")


def broadcast(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """Return rank `root`'s arrays. Collective. Raises OptionError for an invalid root.

    tree: see `all_gather`. The gradient is the sum of the ranks' gradients on `root`, zero elsewhere.
    """
    return call(tree, backend, "broadcast", root=root)


def gather(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """Stack each array of a tree over all ranks on rank `root`: shape (size, *shape); zeros elsewhere. Collective.

    tree: see `all_gather`. Raises OptionError for an invalid root. The gradient is this rank's row of the gradient on
    `root`.
    """
    return call(tree, backend, "gather", f"gather to rank {root}", root=root)


def scatter(tree: Any, backend: AllReduce, root: int = 0) -> Any:
    """Return row r of rank `root`'s arrays on rank r. Collective.

    tree: of arrays of shape (size, ...), on all ranks, any dtype; only `root`'s values count. A result has the shape
    (...). Raises OptionError for an invalid root or another first axis. The gradient is the stack of the ranks'
    gradients on `root`, zero elsewhere.
    """
    return call(tree, backend, "scatter", f"scatter from rank {root}", root=root)


def all_to_all(tree: Any, backend: AllReduce) -> Any:
    """Send row r of each array of a tree to rank r: row s of the result is from rank s. Collective.

    tree: of arrays of shape (size, ...), any dtype; a result has the same shape. Raises OptionError for another first
    axis. The gradient is the `all_to_all` of the ranks' gradients.
    """
    return call(tree, backend, "all_to_all")


def ppermute(tree: Any, backend: AllReduce, perm: Iterable[tuple[int, int]]) -> Any:
    """Send the arrays of a tree from rank to rank, as jax.lax.ppermute: MPI's send, receive and sendrecv. Collective.

    tree: see `all_gather`. perm: pairs (source, destination), the same on all ranks, in any order; OptionError if a
    rank is twice a source or a destination. A rank to which no pair sends gets zeros. The gradient goes the other way.
    """
    return call(tree, backend, "ppermute", perm=perm)
