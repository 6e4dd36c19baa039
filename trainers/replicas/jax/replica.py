"""Any JAX function as a replica, so that trainers can train it. No MPI here."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.replica import Replica, reserved, unfit

try:
    import jax
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f'JaxReplica needs JAX and optax, which can\'t be imported ({error}): pip install ".[jax]" in the checkout'
    ) from error

import jax.numpy as jnp

from trainers.replicas.flat import FlatReplica
from trainers.replicas.jax.layout import TreeLayout, alias, on_host, own
from trainers.replicas.jax.optimizer import Optimizer

Function = Callable[[Any, Any], Any]


class JaxReplica(FlatReplica):
    """A function of parameters, its loss and its optimizer. On the CPU.

    apply: apply(params, x) -> output, which jax.jit can compile; Flax's `module.apply` is one.
    loss: loss(output, y) -> the MEAN over the rows.
    params: a tree of floating arrays of one dtype; copied.
    optimizer: an optax.GradientTransformation. Where ranks divide the update (update="sharded", servers, spare
        replicas) it has to be elementwise, as optax.adam is and optax.clip_by_global_norm is not.
    metrics: by name, metric(output, y), means over the rows, shown beside the loss.

    Also an attribute: `params`, a copy of the parameters as they are, in the tree that was given.

    x and y arrive in the dtype of the parameters where they are floating; integers stay integers, of 32 bits unless
    JAX was told to use 64. Each new number of rows is compiled once. Raises ArgumentError.
    """

    _optimizer: Optimizer

    def __init__(
        self,
        apply: Function,
        loss: Function,
        params: Any,
        optimizer: Any,
        metrics: Mapping[str, Function] | None = None,
    ) -> None:
        self._apply, self._loss, self._metrics = apply, loss, dict(metrics or {})
        self.metrics = ("loss", *self._metrics)
        self._layout = TreeLayout(params)
        self.gradient_dtype, self.gradient_length = self._layout.dtype.name, self._layout.length
        self._tree: Any = jax.tree.map(own, params)  # unless `_memory` holds the parameters
        self._memory: np.ndarray | None = None
        self._transformation = optimizer
        self._optimizer = Optimizer(optimizer, self._layout, self._tree)
        self._slopes = jax.jit(self._measure_slopes, static_argnames="flat")
        self._measures = jax.jit(self._measure, static_argnames="flat")
        self._outputs = jax.jit(self._output, static_argnames="flat")
        self.bind(np.zeros(self.gradient_length, self._layout.dtype))

    # What a trainer calls

    @property
    def params(self) -> Any:
        return jax.tree.map(own, self._tree if self._memory is None else self._layout.cut(self._memory))

    def _move(self, buffer: Any) -> None:
        self._write(buffer)
        self._memory, self._tree = buffer, None

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        if len(x) == 0:
            self._buffer[:] = 0
            return [0.0] * len(self.metrics)
        values, slopes = self._slopes(*self._model(), self._input(x), self._input(y), share)
        self._layout.write(slopes, self._buffer)
        return np.asarray(values)

    def update(self, part: slice | None = None) -> None:
        if self._memory is None and part is None:
            self._tree = self._optimizer.update(self._tree, alias(self._buffer))
            return
        if self._memory is None:
            raise ArgumentError("bind_parameters comes before an update of a slice")
        part = part or slice(0, self.gradient_length)
        changed = self._optimizer.update_slice(part, alias(self._memory), alias(self._buffer))
        np.copyto(self._memory[part], np.asarray(changed))

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Any:
        return len(x) * np.asarray(self._measures(*self._model(), self._input(x), self._input(y)), np.float64)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The output of `apply`; bfloat16 as float32."""
        return np.array(on_host(self._outputs(*self._model(), self._input(x))))

    def snapshot(self, memory: dict[str, np.ndarray], without: Collection[str] = ()) -> dict[str, np.ndarray]:
        held = {}
        if "parameters" not in without:
            dtype = np.dtype(np.float32) if self.gradient_dtype == "bfloat16" else self._layout.dtype
            held["parameters"] = reserved(memory, "parameters", (self.gradient_length,), dtype)
            self._write(held["parameters"])
        return held | self._optimizer.pack(memory, without)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._layout.shapes

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        parameters = state.get("parameters", np.empty(0))
        if set(state) != {"parameters", *self._optimizer.names} or parameters.shape != (self.gradient_length,):
            there = f"{sorted(state)}, {parameters.size} parameters"
            here = f"{sorted(('parameters', *self._optimizer.names))}, {self.gradient_length} parameters"
            raise ModelFileError(f"the saved model is another one: {there} there; {here} here")
        self._optimizer.load(state)
        if self._memory is not None:
            self._memory[:] = parameters
        else:
            self._tree = jax.tree.map(own, self._layout.cut(parameters.astype(self._layout.dtype)))

    def copy(self) -> Replica:
        copied = JaxReplica(self._apply, self._loss, self.params, self._transformation, self._metrics)
        copied.load_state(self.state())
        return copied

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:
        model = self._model()
        try:
            if y is None:
                jax.eval_shape(self._outputs, *model, self._input(x[:1]))
            else:
                jax.eval_shape(self._slopes, *model, self._input(x[:1]), self._input(y[:1]), 1.0)
        except Exception as error:  # whatever the user's functions raise
            raise unfit("apply, loss or a metric", x, y, error) from error

    # Inside

    def _write(self, flat: np.ndarray) -> None:
        """Copy the parameters into flat memory."""
        if self._memory is None:
            self._layout.write(jax.tree.leaves(self._tree), flat)
        else:
            flat[:] = self._memory

    def _model(self) -> tuple[bool, Any]:
        """What the compiled functions take: False and the tree, or True and the flat memory of the trainer."""
        return (False, self._tree) if self._memory is None else (True, alias(self._memory))

    def _input(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self._layout.dtype, copy=False) if array.dtype.kind == "f" else array

    # What is compiled

    def _measure_slopes(self, flat: bool, model: Any, x: Any, y: Any, share: Any) -> tuple[Any, list[Any]]:
        """The metrics, and `share` times the gradients of the loss."""

        def shared(params: Any) -> tuple[Any, Any]:
            output = self._apply(params, x)
            loss = self._loss(output, y)
            return loss * share, (loss, output)

        params = self._layout.cut(model) if flat else model
        slopes, (loss, output) = jax.grad(shared, has_aux=True)(params)
        return self._values(loss, output, y), jax.tree.leaves(slopes)

    def _measure(self, flat: bool, model: Any, x: Any, y: Any) -> Any:
        output = self._output(flat, model, x)
        return self._values(self._loss(output, y), output, y)

    def _output(self, flat: bool, model: Any, x: Any) -> Any:
        return self._apply(self._layout.cut(model) if flat else model, x)

    def _values(self, loss: Any, output: Any, y: Any) -> Any:
        values = [loss, *(metric(output, y) for metric in self._metrics.values())]
        return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
