"""A tree of parameters in flat memory, and conversions between JAX's arrays and NumPy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainers.errors import ArgumentError
from trainers.replicas.flat import Layout

DTYPES = ("float32", "float64", "float16", "bfloat16")
"""The dtypes of parameters that can be averaged, by their names in `allreduce`."""


class TreeLayout(Layout):
    """Layout of the arrays of a tree, in the order of JAX's leaves. shapes: by their names in the tree.

    params: a tree (lists, tuples, dicts, any JAX pytree) of floating arrays of one dtype. Raises ArgumentError.
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
        """Return the tree of the parts of a flat array."""
        return jax.tree.unflatten(self.tree, self.views(flat))


def _dtype(leaf: Any) -> str:
    """Return the dtype that JAX gives a leaf: float32 for NumPy's float64, unless JAX uses 64 bits."""
    if isinstance(leaf, np.ndarray | np.generic):
        return str(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def alias(array: np.ndarray) -> jax.Array:
    """Return a JAX array in the memory of `array`. Do not keep it; do not change the memory while JAX still uses it.

    Returns a copy if XLA can't use that memory: it requires an alignment of 64 bytes, and NumPy has no bfloat16.
    """
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return own(array)
    return jax.dlpack.from_dlpack(array)


def own(array: Any) -> jax.Array:
    """Return a copy, committed to the CPU: if some arrays are not committed, JAX compiles everything twice."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        return jax.device_put(jnp.array(array, copy=True), cpu)


def on_host(leaf: Any) -> np.ndarray:
    """Return a leaf as a NumPy array, maybe a read-only view: random keys as integers, bfloat16 as float32."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def like(array: np.ndarray, leaf: Any) -> jax.Array:
    """The inverse of `on_host`: return a JAX array of the kind of `leaf` (its dtype, or random keys)."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(own(array), impl=jax.random.key_impl(leaf))
    return own(np.asarray(array, leaf.dtype))
