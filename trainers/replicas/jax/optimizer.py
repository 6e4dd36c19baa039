"""An optax optimizer on the tree of parameters, or on a slice of the flat ones; its state as named arrays."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import reserved
from trainers.replicas.jax import trial
from trainers.replicas.jax.layout import Layout, like, on_host, own


class Optimizer:
    """A transformation of gradients and its state.

    transformation: an optax.GradientTransformation that needs nothing but gradients and parameters. ArgumentError.
    names: of the parts of the state. elementwise: those of them with one number for each parameter.
    part: the slice whose state is here; None when it is the whole tree's.
    """

    def __init__(self, transformation: Any, layout: Layout, params: Any) -> None:
        self._check(transformation, params)
        self._transformation, self._layout = transformation, layout
        self.state = jax.tree.map(own, jax.jit(transformation.init)(params))
        self.part: slice | None = None
        flat = _flat_pattern(transformation, layout, self.state)
        self._fits = flat is not None
        pattern = self.state if flat is None else flat
        paths, self._structure = jax.tree_util.tree_flatten_with_path(pattern)
        self.names = tuple(f"optimizer{jax.tree_util.keystr(path)}" for path, _ in paths)
        whole = [self._fits and leaf.shape == (layout.length,) for _, leaf in paths]
        self.elementwise = tuple(name for name, is_whole in zip(self.names, whole, strict=True) if is_whole)
        self._refusal: str | None = None
        self._on_tree = jax.jit(self._update_tree, donate_argnums=(0, 1))
        self._on_slice = jax.jit(self._update_slice, static_argnums=(0, 1), donate_argnums=(3,))

    def refusal(self) -> str:
        """Why it can't work on slices, or "": it is tried out, once."""
        if self._refusal is None:
            with jax.debug_nans(False), jax.debug_infs(False):  # the trial has them on purpose
                slices = self._fits and trial.works_on_slices(self._transformation, self._layout)
            self._refusal = "" if slices else REFUSAL
        return self._refusal

    def update(self, params: Any, gradients: jax.Array) -> Any:
        """The next parameters, a tree; `params` are used up. gradients: flat; they have been read on return."""
        params, self.state = self._on_tree(params, self.state, gradients)
        return jax.block_until_ready((params, self.state))[0]

    def update_slice(self, part: slice, params: jax.Array, gradients: jax.Array) -> jax.Array:
        """The next parameters of a slice. params, gradients: flat and whole; they have been read on return."""
        if self.part != part:
            self.widen()
            self.state = self._sliced(part)
            self.part = part
        changed, self.state = self._on_slice(part.start, part.stop, params, self.state, gradients)
        return jax.block_until_ready((changed, self.state))[0]

    def widen(self) -> None:
        """Have the state of the whole tree again; of other slices than this one's it is zero."""
        if self.part is not None:
            self.load(self.pack({}))

    def pack(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        """The state as copies in `memory`, by name; of a slice's the rest is zero."""
        held = {}
        for name, entry in zip(self.names, self._entries(), strict=True):
            if name in without:
                continue
            arrays = [on_host(leaf) for leaf in jax.tree.leaves(entry)]
            shape = (self._layout.length,) if name in self.elementwise else arrays[0].shape
            place = held[name] = reserved(memory, name, shape, arrays[0].dtype)
            if name not in self.elementwise:
                place[...] = arrays[0]
            elif self.part is None:
                self._layout.write(arrays, place)
            else:
                place[:] = 0
                place[self.part] = arrays[0]
        return held

    def elements(self, name: str) -> np.ndarray:
        """An elementwise entry, of the slice alone."""
        return on_host(self._entries()[self.names.index(name)])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take on what `pack` gave, as the state of the whole tree. ModelFileError when it is another one's."""
        made = []
        for name, entry in zip(self.names, self._entries(), strict=True):
            leaves = jax.tree.leaves(entry)
            shape = (self._layout.length,) if name in self.elementwise else on_host(leaves[0]).shape
            if name not in arrays or arrays[name].shape != shape:
                found = f"{arrays[name].shape}" if name in arrays else "missing"
                raise ModelFileError(f"the saved model is another one: {name} is {found} there and {shape} here")
            pieces = self._layout.views(arrays[name]) if name in self.elementwise else [arrays[name]]
            cut = [like(piece, leaves[0]) for piece in pieces]
            made.append(jax.tree.unflatten(self._layout.tree, cut) if name in self.elementwise else cut[0])
        self.state, self.part = jax.tree.unflatten(self._structure, made), None

    # Learning rates: those that optax.inject_hyperparams has put into the state

    @property
    def learning_rates(self) -> list[float]:
        return [float(leaf) for path, leaf in self._paths() if _is_rate(path)]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        paths, given = self._paths(), iter(rates)
        leaves = [like(np.asarray(next(given)), leaf) if _is_rate(path) else leaf for path, leaf in paths]
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)

    # Inside

    def _check(self, transformation: Any, params: Any) -> None:
        if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
            kind = type(transformation)
            raise ArgumentError(
                f"JaxReplica takes an optimizer of optax (optax.adam(1e-3), say), not {kind.__module__}."
                f"{kind.__qualname__}"
            )
        try:
            jax.eval_shape(lambda tree: transformation.update(tree, transformation.init(tree), tree), params)
        except Exception as error:  # whatever a transformation raises
            raise ArgumentError(
                "this optimizer can't be used by JaxReplica, which gives it gradients and parameters of this model and "
                f"nothing else: {type(error).__name__}: {error}"
            ) from error

    def _update_tree(self, params: Any, state: Any, gradients: jax.Array) -> tuple[Any, Any]:
        # Behind the barrier nothing that is returned can be the gradients themselves, whose memory is the trainer's.
        cut = self._layout.cut(jax.lax.optimization_barrier(gradients))
        changes, state = self._transformation.update(cut, state, params)
        return optax.apply_updates(params, changes), state

    def _update_slice(
        self, start: int, stop: int, params: jax.Array, state: Any, gradients: jax.Array
    ) -> tuple[jax.Array, Any]:
        mine, slopes = (jax.lax.optimization_barrier(whole)[start:stop] for whole in (params, gradients))
        changes, state = self._transformation.update(slopes, state, mine)
        return optax.apply_updates(mine, changes), state

    def _entries(self) -> list[Any]:
        """The part of the state behind each name: an array, or a tree as the parameters'."""
        return self._structure.flatten_up_to(self.state)

    def _sliced(self, part: slice) -> Any:
        """The state of a slice, made from that of the whole tree."""
        whole = self.pack({})
        made = [
            like(whole[name][part] if name in self.elementwise else whole[name], jax.tree.leaves(entry)[0])
            for name, entry in zip(self.names, self._entries(), strict=True)
        ]
        return jax.tree.unflatten(self._structure, made)

    def _paths(self) -> list[tuple[Any, Any]]:
        return jax.tree_util.tree_flatten_with_path(self.state)[0]


REFUSAL = (
    "this optimizer can't work on slices of the parameters, which the ranks would divide: it needs whole arrays, or "
    'the norm of all gradients (it was tried out). Use update="replicated", or an elementwise one, as optax.adam and '
    "optax.sgd are"
)


def _flat_pattern(transformation: Any, layout: Layout, state: Any) -> Any:
    """The state (its shapes) for the flat parameters, of which `state` is the same with trees; None where it is not."""
    try:
        flat = jax.eval_shape(transformation.init, jax.ShapeDtypeStruct((layout.length,), layout.dtype))
        leaves, structure = jax.tree.flatten(flat)
        entries = structure.flatten_up_to(state)
    except Exception:  # a mask for this very tree, say
        return None
    for leaf, entry in zip(leaves, entries, strict=True):
        shapes = [array.shape for array in jax.tree.leaves(entry)]
        if shapes != (list(layout.shapes.values()) if leaf.shape == (layout.length,) else [leaf.shape]):
            return None
    return flat


def _is_rate(path: Sequence[Any]) -> bool:
    """Whether a leaf is a learning rate that can be set: `hyperparams["learning_rate"]`."""
    return jax.tree_util.keystr(path[-2:]) == ".hyperparams['learning_rate']"
