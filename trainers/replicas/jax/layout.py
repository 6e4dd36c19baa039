"""A tree of parameters in flat memory, and conversions between JAX's arrays and NumPy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainers.errors import ArgumentError
from trainers.replicas.flat import Layout

DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The dtypes of parameters that can be averaged, by the names that `allreduce` has for them."""


class TreeLayout(Layout):
    """The arrays of a tree, in the order of JAX's leaves. shapes: by their names in the tree.

    params: lists, tuples, dicts and whatever JAX takes for a tree, of floating arrays of one dtype. ArgumentError.
    """

    def __init__(self, params: Any) -> None:
        paths, self.tree = jax.tree_util.tree_flatten_with_path(params)
        found = {_dtype(leaf) for _, leaf in paths}
        if len(found) != 1 or not found <= set(DTYPES):
            raise ArgumentError(
                f"params must be a tree of arrays of one dtype of {', '.join(DTYPES)}, and holds "
                f"{', '.join(sorted(found)) or 'no array'}; put arrays that are not trained into apply"
            )
        self.dtype = np.dtype(found.pop())
        self.shapes = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in paths}
        super().__init__(self.shapes.values())

    def cut(self, flat: Any) -> Any:
        """The tree in a flat array."""
        return jax.tree.unflatten(self.tree, self.views(flat))


def _dtype(leaf: Any) -> str:
    """The dtype that JAX gives a leaf: float32 for NumPy's float64, unless JAX uses 64 bits."""
    if isinstance(leaf, np.ndarray | np.generic):
        return str(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def alias(array: np.ndarray) -> jax.Array:
    """A JAX array in the memory of `array`, which must not change until it has been used, nor be kept.

    A copy where XLA can't use that memory: it wants an alignment of 64 bytes, and NumPy knows no bfloat16.
    """
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return own(array)
    return jax.dlpack.from_dlpack(array)


def own(array: Any) -> jax.Array:
    """A JAX array with memory of its own, committed to the CPU: beside uncommitted ones, JAX compiles all twice."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        return jax.device_put(jnp.array(array, copy=True), cpu)


def on_host(leaf: Any) -> np.ndarray:
    """A leaf as an array that a file can hold: keys as numbers, bfloat16 as float32. May be a read-only view."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def like(array: np.ndarray, leaf: Any) -> jax.Array:
    """The inverse of `on_host`: a JAX array of the kind of `leaf`."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(own(array), impl=jax.random.key_impl(leaf))
    return own(np.asarray(array, leaf.dtype))
