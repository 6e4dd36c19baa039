"""JaxReplica: any JAX function as a replica for the trainers. No MPI."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainers.arrays.average import Spans
from trainers.data import Tree, as_arrays, mapped, row_count, sliced
from trainers.errors import ArgumentError, ExportError, needing
from trainers.files.onnx_graph import quiet
from trainers.replica import ALL, Replica, Slices, compare_losses, feeding, single

with needing(
    'JaxReplica needs JAX and optax, which can\'t be imported ({}): pip install ".[jax]" in the checkout', ImportError
):
    import jax
    import optax  # noqa: F401

import jax.numpy as jnp

from trainers.replicas.flat import FlatReplica, lower_precision
from trainers.replicas.jax.layout import TreeLayout, alias, on_host, own
from trainers.replicas.jax.optimizer import Optimizer

Function = Callable[[Any, Any], Any]


class JaxReplica(FlatReplica):
    """A function of parameters, its loss and its optimizer. On the CPU.

    apply: apply(params, x) -> output; jax.jit must be able to compile it. Flax's `module.apply` is one. x, y and output
        may be tuples or dicts of arrays.
    loss: loss(output, y) -> the MEAN over the rows. To weigh rows, it is called for each row (jax.vmap).
    params: a tree of floating arrays of one dtype; copied.
    optimizer: an optax.GradientTransformation. If ranks divide the update (update="sharded", servers, spare replicas),
        it must be elementwise, as optax.adam is and optax.clip_by_global_norm is not.
    metrics: name -> metric(output, y), a mean over the rows; shown with the loss.
    precision: "bfloat16": `apply` gets the parameters and floating x as bfloat16; parameters, gradients and the
        optimizer stay float32. None: the parameters' dtype.

    Attribute `params`: a copy of the current parameters, as a tree like the one given. Assign a tree to change them.

    Floating x and y are converted to the dtype of the parameters. Integers stay integers, of 32 bits unless JAX uses
    64. Each new number of rows is compiled once. Raises ArgumentError.
    """

    takes_weights = True
    optimizer_state: Optimizer

    def __init__(
        self,
        apply: Function,
        loss: Function,
        params: Any,
        optimizer: Any,
        metrics: Mapping[str, Function] | None = None,
        *,
        precision: str | None = None,
    ) -> None:
        self._apply, self._loss, self._metrics = apply, loss, dict(metrics or {})
        self.metrics = ("loss", *self._metrics)
        self._layout = TreeLayout(params)
        self.gradient_dtype, self.gradient_length = self._layout.dtype.name, self._layout.length
        self.shapes = self._layout.shapes
        self._precision, self.loss_name = precision, getattr(loss, "__name__", type(loss).__name__)
        self._low = lower_precision(precision, self.gradient_dtype)
        self.config = {"precision": "bfloat16" if self._low else self.gradient_dtype}
        self._tree: Any = jax.tree.map(own, params)  # unless `memory` holds the parameters
        self._transformation = optimizer
        self.optimizer_state = Optimizer(optimizer, self._layout, self._tree)
        self._gradients = jax.jit(self._measure_gradients, static_argnames="flat")
        self._measures = jax.jit(self._measure, static_argnames="flat")
        self._outputs = jax.jit(self._output, static_argnames="flat")
        self.bind(None, np.zeros(self.gradient_length, self._layout.dtype))

    # Methods of Replica

    @property
    def params(self) -> Any:
        return jax.tree.map(own, self._tree if self.memory is None else self._layout.cut(self.memory))

    @params.setter
    def params(self, params: Any) -> None:
        given = TreeLayout(params)
        if (given.tree, given.shapes) != (self._layout.tree, self._layout.shapes):
            raise ArgumentError(f"params must be a tree like the one of this JaxReplica, {self._layout.shapes}")
        flat = np.empty(self.gradient_length, self._layout.dtype)
        self._layout.write(jax.tree.leaves(params), flat)
        self.put((slice(0, self.gradient_length),), flat)

    def bind(self, parameters: Any, gradients: Any) -> None:
        super().bind(parameters, gradients)
        if parameters is not None:
            self._tree = None

    def _leave(self) -> None:
        self._tree = self.params

    def arrays(self) -> Sequence[Any]:
        if self.memory is not None:
            return super().arrays()
        return [np.asarray(each).reshape(-1) for each in jax.tree.leaves(self._tree)]

    def put(self, spans: Spans, values: Any) -> None:
        if self.memory is not None:
            super().put(spans, values)
        else:
            self._tree = jax.tree.map(own, self._layout.cut(values.astype(self._layout.dtype)))

    def gradients(self, x: Tree, y: Tree, share: float, weights: np.ndarray | None = None) -> Any:
        if row_count(x) == 0:
            self._buffer[:] = 0
            return [0.0] * len(self.metrics)
        values, gradients = self._gradients(*self._model(), *self._inputs(x, y), self._wide(weights), share)
        self._layout.write(gradients, self._buffer)
        return np.asarray(values)

    def update(self, part: Slices = ALL) -> None:
        if self.memory is None:
            self._tree = self.optimizer_state.update(self._tree, alias(self._buffer))
            return
        part = slice(0, self.gradient_length) if part == ALL else single(part)
        changed = self.optimizer_state.update_slice(part, alias(self.memory), alias(self._buffer))
        np.copyto(self.memory[part], np.asarray(changed))

    def evaluate(self, x: Tree, y: Tree, weights: np.ndarray | None = None) -> Any:
        means = self._measures(*self._model(), *self._inputs(x, y), self._wide(weights))
        return row_count(x) * np.asarray(means, np.float64)

    def predict(self, x: Tree) -> Tree:
        """Return the output of `apply`; bfloat16 as float32."""
        outputs = self._outputs(*self._model(), *self._inputs(x))
        return as_arrays(jax.tree.map(lambda leaf: np.array(on_host(leaf)), outputs), lists=True)

    def to_onnx(self, x: Tree) -> Any:
        missing = (
            "the export of a JaxReplica needs jax2onnx, which can't be imported ({}): "
            'pip install ".[export,export-jax]" in the checkout'
        )
        with needing(missing, ExportError), quiet("jax2onnx"):
            import jax2onnx
        wide = lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
        params, given = jax.tree.map(wide, self.params), mapped(lambda array: wide(self._input(array)), x)
        tree = jax.tree.structure(given)
        inputs = [jax.ShapeDtypeStruct(("B", *each.shape[1:]), each.dtype) for each in jax.tree.leaves(given)]

        def outputs(*arrays: Any) -> Any:
            return jax.tree.leaves(self._apply(params, jax.tree.unflatten(tree, arrays)))

        with quiet("jax2onnx", "onnx_ir"):
            return jax2onnx.to_onnx(lambda *arrays: tuple(outputs(*arrays)), inputs)

    def __deepcopy__(self, memo: Any) -> Replica:
        copied = JaxReplica(
            self._apply, self._loss, self.params, self._transformation, self._metrics, precision=self._precision
        )
        copied.load_state(self.state())
        return copied

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        model = self._model()
        with feeding("apply, loss or a metric", x, y):
            if y is None:
                jax.eval_shape(self._outputs, *model, *self._inputs(sliced(x, slice(1))))
            else:
                own = self._wide(None if weights is None else weights[:1])
                jax.eval_shape(self._gradients, *model, *self._inputs(*sliced((x, y), slice(1))), own, 1.0)
        if y is not None and weights is not None:
            compare_losses(self, x, y)  # rows with weights: JAX calls the loss for each row

    # Inside

    def _model(self) -> tuple[bool, Any]:
        """Return the first arguments of compiled functions: (False, the tree) or (True, the trainer's flat memory)."""
        return (False, self._tree) if self.memory is None else (True, alias(self.memory))

    def _inputs(self, *trees: Tree) -> list[Any]:
        """Return x and y as the compiled functions take them."""
        return [mapped(self._input, tree) for tree in trees]

    def _wide(self, weights: np.ndarray | None) -> np.ndarray | None:
        """Return weights as the compiled functions take them: of 32 bits at least, else 0.137 would be rounded."""
        return None if weights is None else weights.astype(np.promote_types(self._layout.dtype, np.float32))

    def _input(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self._layout.dtype, copy=False) if array.dtype.kind == "f" else array

    # Compiled functions

    def _measure_gradients(
        self, flat: bool, model: Any, x: Any, y: Any, weights: Any, share: Any
    ) -> tuple[Any, list[Any]]:
        """Return the metrics, and `share` times the gradients of the loss."""

        def shared(params: Any) -> tuple[Any, Any]:
            output = self._applied(params, x)
            loss = self._mean_loss(output, y, weights)
            return loss * share, (loss, output)

        params = self._layout.cut(model) if flat else model
        gradients, (loss, output) = jax.grad(shared, has_aux=True)(params)
        return self._values(loss, output, y), jax.tree.leaves(gradients)

    def _measure(self, flat: bool, model: Any, x: Any, y: Any, weights: Any) -> Any:
        output = self._output(flat, model, x)
        return self._values(self._mean_loss(output, y, weights), output, y)

    def _mean_loss(self, output: Any, y: Any, weights: Any) -> Any:
        """Return the loss of these rows: the mean over the rows of their weighted losses."""
        if weights is None:
            return self._loss(output, y)
        first = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
        losses = jax.vmap(lambda output, y: self._loss(first(output), first(y)))(output, y)
        return (losses * weights).mean()

    def _output(self, flat: bool, model: Any, x: Any) -> Any:
        return self._applied(self._layout.cut(model) if flat else model, x)

    def _applied(self, params: Any, x: Any) -> Any:
        """Return the output of `apply`; with precision="bfloat16" computed with bfloat16, as float32."""
        if not self._low:
            return self._apply(params, x)
        lower = lambda leaf: leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
        raise_ = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf  # noqa: E731
        return jax.tree.map(raise_, self._apply(*jax.tree.map(lower, (params, x))))

    def _values(self, loss: Any, output: Any, y: Any) -> Any:
        values = [loss, *(metric(output, y) for metric in self._metrics.values())]
        return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
