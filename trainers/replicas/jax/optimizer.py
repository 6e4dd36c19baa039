"""An optax optimizer on the tree of parameters, or on a slice of the flat ones."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainers.errors import ArgumentError, explained
from trainers.replica import Slices
from trainers.replicas.flat import FlatOptimizer
from trainers.replicas.jax.layout import TreeLayout, like, on_host, own


class Optimizer(FlatOptimizer):
    """An optax optimizer and its state.

    transformation: an optax.GradientTransformation that needs only gradients and parameters. Raises ArgumentError.
    """

    layout: TreeLayout
    how_to_set_rates = "; create the optimizer with optax.inject_hyperparams(optax.adam)(learning_rate=...) to have one"

    def __init__(self, transformation: Any, layout: TreeLayout, params: Any) -> None:
        _check(transformation, params)
        self._transformation = transformation
        self.state = jax.tree.map(own, jax.jit(transformation.init)(params))
        flat = _flat_pattern(transformation, layout, self.state)
        self._fits = flat is not None
        pattern = self.state if flat is None else flat
        paths, self._structure = jax.tree_util.tree_flatten_with_path(pattern)
        shapes = {f"optimizer{jax.tree_util.keystr(path)}": leaf.shape for path, leaf in paths}
        elementwise = [name for name, shape in shapes.items() if self._fits and shape == (layout.length,)]
        super().__init__(layout, shapes, elementwise)
        self._slice_error: str | None = None
        self._on_tree = jax.jit(self._update_tree, donate_argnums=(0, 1))
        self._on_slice = jax.jit(self._update_slice, static_argnums=(0, 1), donate_argnums=(3,))

    def slice_error(self) -> str:
        if self._slice_error is None:
            with jax.debug_nans(False), jax.debug_infs(False):  # the trial contains NaN and infinities on purpose
                slices = self._fits and works_on_slices(self._transformation, self.layout)
            self._slice_error = "" if slices else SLICE_ERROR
        return self._slice_error

    def update(self, params: Any, gradients: jax.Array) -> Any:
        """Return the updated parameters, a tree. params: donated, not usable afterwards. gradients: flat."""
        params, self.state = self._on_tree(params, self.state, gradients)
        return jax.block_until_ready((params, self.state))[0]  # the gradients' memory has been read

    def update_slice(self, part: slice, params: jax.Array, gradients: jax.Array) -> jax.Array:
        """Return the updated parameters of a slice. params, gradients: flat, of all parameters."""
        self.restrict(part)
        changed, self.state = self._on_slice(part.start, part.stop, params, self.state, gradients)
        return jax.block_until_ready((changed, self.state))[0]  # the memory of both has been read

    def entries(self, names: Collection[str]) -> dict[str, list[Any]]:
        """An entry is a tree like the parameters, or one array."""
        entries = zip(self.names, self._structure.flatten_up_to(self.state), strict=True)
        return {name: jax.tree.leaves(entry) for name, entry in entries if name in names}

    on_host = staticmethod(on_host)

    def write(self, part: Slices | None, entries: Mapping[str, list[np.ndarray]]) -> None:
        made = []
        for name, (pattern, *_) in self.entries(self.names).items():
            leaves = [like(array, pattern) for array in entries[name]]
            of_tree = part is None and name in self.elementwise
            made.append(jax.tree.unflatten(self.layout.tree, leaves) if of_tree else leaves[0])
        self.state, self.part = jax.tree.unflatten(self._structure, made), part

    # Learning rates that optax.inject_hyperparams has put into the state

    @property
    def learning_rates(self) -> list[float]:
        return [float(leaf) for path, leaf in self._paths() if _is_rate(path)]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        paths, given = self._paths(), iter(rates)
        leaves = [like(np.asarray(next(given)), leaf) if _is_rate(path) else leaf for path, leaf in paths]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)

    def _update_tree(self, params: Any, state: Any, gradients: jax.Array) -> tuple[Any, Any]:
        # The barrier keeps XLA from returning the gradients' memory, which belongs to the trainer.
        cut = self.layout.cut(jax.lax.optimization_barrier(gradients))
        changes, state = self._transformation.update(cut, state, params)
        return optax.apply_updates(params, changes), state

    def _update_slice(
        self, start: int, stop: int, params: jax.Array, state: Any, gradients: jax.Array
    ) -> tuple[jax.Array, Any]:
        sliced, gradients = (jax.lax.optimization_barrier(whole)[start:stop] for whole in (params, gradients))
        changes, state = self._transformation.update(gradients, state, sliced)
        return optax.apply_updates(sliced, changes), state

    def _paths(self) -> list[tuple[Any, Any]]:
        return jax.tree_util.tree_flatten_with_path(self.state)[0]


SLICE_ERROR = (
    "this optimizer can't update slices of the parameters, one on each rank: it needs whole arrays, or the norm of "
    'all gradients. Use update="replicated", or an elementwise optimizer, such as optax.adam and optax.sgd'
)


def _check(transformation: Any, params: Any) -> None:
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        kind = type(transformation)
        raise ArgumentError(
            f"JaxReplica takes an optax optimizer, as optax.adam(1e-3), not {kind.__module__}.{kind.__qualname__}"
        )
    wrong = "this optimizer can't be used by JaxReplica, which passes only gradients and parameters of this model to it"
    with explained(ArgumentError, wrong):
        jax.eval_shape(lambda tree: transformation.update(tree, transformation.init(tree), tree), params)


def _flat_pattern(transformation: Any, layout: TreeLayout, state: Any) -> Any:
    """Return the shapes of the state for flat parameters; None if they do not correspond to `state` entry by entry."""
    try:
        flat = jax.eval_shape(transformation.init, jax.ShapeDtypeStruct((layout.length,), layout.dtype))
        leaves, structure = jax.tree.flatten(flat)
        entries = structure.flatten_up_to(state)
    except Exception:  # for example, of a mask for this tree
        return None
    for leaf, entry in zip(leaves, entries, strict=True):
        shapes = [array.shape for array in jax.tree.leaves(entry)]
        if shapes != (list(layout.shapes.values()) if leaf.shape == (layout.length,) else [leaf.shape]):
            return None
    return flat


def _is_rate(path: Sequence[Any]) -> bool:
    """Whether the leaf at `path` is a learning rate that can be set: `hyperparams["learning_rate"]`."""
    return jax.tree_util.keystr(path[-2:]) == ".hyperparams['learning_rate']"


MOST = 3  # elements along each axis of the arrays of the trial
SCALES = (1.0, 1e-6, 1e6, 1.0)  # of the gradients in each step of the trial: some optimizers change only large ones


def works_on_slices(transformation: Any, layout: TreeLayout) -> bool:
    """Whether the optimizer changes two slices as it changes the whole tree.

    Optax does not tell, so this tests it on small arrays with the names and axes of this tree.
    """
    shapes = [tuple(min(size, MOST) for size in shape) for shape in layout.shapes.values()]
    random = np.random.default_rng(0)
    small = TreeLayout(jax.tree.unflatten(layout.tree, [np.empty(shape, layout.dtype) for shape in shapes]))
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
    """Return the changes of the parameters in each step, flat: (steps, elements)."""

    def step(state: Any, gradients: Any) -> tuple[Any, jax.Array]:
        changes, state = transformation.update(gradients, state, params)
        return state, jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(changes)])

    return jax.lax.scan(step, transformation.init(params), steps)[1]
