"""Whether an optimizer treats every element apart from all others, which optax does not say: it is tried out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainers.replicas.jax.layout import Layout

MOST = 3  # elements along each axis of the small arrays on which it is tried
SCALES = (1.0, 1e-6, 1e6, 1.0)  # of the gradients of the steps: some change only what is large; the last has a NaN


def works_on_slices(transformation: Any, layout: Layout) -> bool:
    """True when two slices by themselves are updated as the tree is. Takes the names and axes of this tree."""
    shapes = [tuple(min(size, MOST) for size in shape) for shape in layout.shapes.values()]
    random = np.random.default_rng(0)
    small = Layout(jax.tree.unflatten(layout.tree, [np.empty(shape, layout.dtype) for shape in shapes]))
    flat = jnp.asarray(random.normal(size=small.length), layout.dtype)
    steps = jnp.asarray(np.outer(SCALES, random.normal(size=small.length)), layout.dtype).at[-1, 0].set(jnp.nan)
    cut = small.length // 2

    @jax.jit
    def changes() -> tuple[jax.Array, jax.Array]:
        parts = [_changes(transformation, flat[part], steps[:, part]) for part in (slice(0, cut), slice(cut, None))]
        return _changes(transformation, small.cut(flat), jax.vmap(small.cut)(steps)), jnp.concatenate(parts, axis=1)

    try:
        whole, sliced = (np.asarray(array, np.float64) for array in changes())
    except Exception:  # whatever a transformation raises
        return False
    return bool(np.allclose(whole, sliced, rtol=0.05 if layout.dtype.itemsize == 2 else 1e-4, atol=0, equal_nan=True))


def _changes(transformation: Any, params: Any, steps: Any) -> jax.Array:
    """What the optimizer makes of the gradients of each step, flat: (steps, elements)."""

    def step(state: Any, gradients: Any) -> tuple[Any, jax.Array]:
        changes, state = transformation.update(gradients, state, params)
        return state, jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(changes)])

    return jax.lax.scan(step, transformation.init(params), steps)[1]
