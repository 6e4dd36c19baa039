"""KerasReplica: any Keras model as a replica for the trainers. No MPI."""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import keras
import numpy as np

from trainers.arrays.average import Spans
from trainers.data import Tree, as_arrays, mapped, row_count, sliced
from trainers.errors import ArgumentError, ModelFileError, explained
from trainers.files.onnx_graph import need_onnx, quiet
from trainers.replica import ALL, Replica, Slices, clipped, feeding, single
from trainers.replicas.flat import FlatReplica, Layout
from trainers.replicas.keras.computing import COMPUTING, array_of, assign
from trainers.replicas.keras.optimizer import Optimizer

DTYPES = ("float32", "float64", "float16")
RANDOM_LAYERS = (
    "Exact: this Keras model has layers with random numbers (Dropout, noise), whose generators "
    "can't be seeded for each micro-batch; leave out these layers, or Exact"
)
CROSS_ENTROPIES = keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy


class KerasReplica(FlatReplica):
    """A Keras model, its loss and its optimizer, with the Keras backend JAX, PyTorch or TensorFlow.

    model: a built keras.Model whose trained variables all have the same dtype: float32, float64 or float16.
    loss: a Keras loss, its name, or a function loss(y, output); the mean over the rows is used. Losses of layers are
        added. To weigh rows, a function must return the loss of each row, as Keras' functions do.
    optimizer: a Keras optimizer, or its name. If ranks divide the update (update="sharded", servers, spare replicas),
        it must be elementwise, such as Adam (trainers.replicas.keras.optimizer.ELEMENTWISE), without clipnorm.
    metrics: name -> metric(y, output), such as keras.metrics.sparse_categorical_accuracy; the means are shown with the
        loss.

    x and y may be tuples or dicts of arrays; a model that was made with a list of inputs takes a tuple. Floating x and
    y are converted to the dtype of the variables. The moving means and variances of batch norm are
    averaged over the ranks, by rows, with the gradients; the random state of layers differs between ranks. Raises
    ArgumentError.
    """

    takes_weights = True
    optimizer_state: Optimizer

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    ) -> None:
        self.model, self._loss, self._metrics = model, _loss_of(loss), dict(metrics or {})
        self.metrics = ("loss", *self._metrics)
        self._trained = _trained_of(model)
        self.counts = getattr(self._loss, "ignore_class", None) is not None
        self.optional = len(self._trained)
        self.unused = self.still = np.zeros(self.optional, bool)
        self.gradient_dtype = keras.backend.standardize_dtype(self._trained[0].dtype)
        self._statistics = _statistics_of(model, self.gradient_dtype)
        self._layout = Layout(each.shape for each in [*self._trained, *self._statistics])
        self.gradient_length = self._layout.length
        self.statistics = sum(math.prod(each.shape) for each in self._statistics)
        optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
        self.config = {"model": model.name, "optimizer": type(optimizer).__name__}
        self.optimizer_state = Optimizer(optimizer, self._trained, self.gradient_dtype)
        random = {id(each) for each in model.variables} - {id(each) for each in model.weights}
        others = model.non_trainable_variables
        self._shared = {f"model.{n}": each for n, each in enumerate(others) if id(each) not in random}
        self._random = {f"random.{n}": each for n, each in enumerate(others) if id(each) in random}
        self.unseeded = RANDOM_LAYERS if self._random else ""
        self.shapes = {f"{number}/{each.name}": tuple(each.shape) for number, each in enumerate(self._trained)}
        self.scores, self.loss_name = _scores_of(self._loss), _name_of(self._loss)
        self._computing = COMPUTING[keras.backend.backend()](model, self._measured)
        self._takes_list = isinstance(getattr(model, "input", None), list)
        self._before: list[np.ndarray] = []
        self.bind(None, np.zeros(self.gradient_length, self.gradient_dtype))

    # Methods of Replica

    def bind(self, parameters: Any, gradients: Any) -> None:
        self._refresh_model()
        super().bind(parameters, gradients)
        if parameters is not None:
            self._store(parameters)

    def _leave(self) -> None:
        self._refresh_model()  # from now on the model alone has the weights, and the user may set them

    def edit(self, change: Callable[[], object]) -> None:
        self._refresh_model()
        change()
        if self.memory is not None:
            self._store(self.memory)

    def gradients(self, x: Tree, y: Tree, share: float, weights: np.ndarray | None = None) -> Any:
        if row_count(x) == 0:
            self._buffer[:] = 0
            self.unused = np.ones(self.optional, bool)
            return [0.0] * len(self.metrics)
        self._refresh_model()
        if self.undoable:
            self._before = [np.array(array_of(each)) for each in self._shared.values()]
        weight = self._mean_weight(y)
        x, y, weights = self._inputs(x, y, weights)
        values, gradients = self._computing.gradients(x, y, weights, share * weight)
        self.unused = np.array([each is None for each in gradients])
        statistics = [array_of(each) * np.asarray(share, self.gradient_dtype) for each in self._statistics]
        self._layout.write([*gradients, *statistics], self._buffer)
        return [values[0] * weight, *values[1:]]

    def counted(self, y: Tree) -> float:
        y = np.asarray(y)
        return float((y != self._loss.ignore_class).sum()) * len(y) / max(y.size, 1)

    def _mean_weight(self, y: Tree) -> float:
        """Return the factor that makes Keras' mean over the targets that are not ignored the sum, per row."""
        return self.counted(y) / row_count(y) if self.counts else 1.0

    def undo(self) -> None:
        if self._before:
            self._set(self._shared.values(), self._before)
        self._before = []

    def update(self, part: Slices = ALL) -> None:
        self._before = []
        if part == ALL:
            self._load_statistics(self._buffer)
        if self.memory is None:
            self.optimizer_state.update(self._buffer, self.still)
            return
        part = slice(0, self.gradient_length) if part == ALL else part
        trained, statistics = clipped(part, 0, self.parameter_count), clipped(part, self.parameter_count, sys.maxsize)
        self.optimizer_state.update_slice(single(trained), self.memory, self._buffer, self.still)
        self.memory[single(statistics)] = self._buffer[single(statistics)]

    def refresh(self) -> None:
        self._before = []
        if self.memory is not None:
            self._load_statistics(self.memory)

    def evaluate(self, x: Tree, y: Tree, weights: np.ndarray | None = None) -> Any:
        self._refresh_model()
        sums = row_count(x) * np.array(self._computing.metrics(*self._inputs(x, y, weights)), np.float64)
        sums[0] *= self._mean_weight(y)
        return sums

    def predict(self, x: Tree) -> Tree:
        self._refresh_model()
        none = row_count(x) == 0
        if none:
            x = mapped(lambda array: np.zeros((1, *array.shape[1:]), array.dtype), x)
        outputs = as_arrays(self._computing.output(*self._inputs(x)), lists=True)
        return sliced(outputs, slice(0)) if none else outputs

    def arrays(self) -> Sequence[Any]:
        if self.memory is not None:
            return super().arrays()
        return [array_of(each).reshape(-1) for each in self._trained]

    def put(self, spans: Spans, values: Any) -> None:
        if self.memory is not None:
            super().put(spans, values)
            self._refresh_model()
        else:
            self._set(self._trained, self.optimizer_state.layout.views(values.astype(self.gradient_dtype)))

    def others(self) -> dict[str, np.ndarray]:
        return {name: array_of(each) for name, each in self._shared.items()}

    def to_onnx(self, x: Tree) -> Any:
        """See Replica.to_onnx. Keras itself exports the model, with the backend JAX by jax2onnx."""
        onnx = need_onnx()
        self._refresh_model()
        self.model(*self._inputs(x))  # Keras exports only models that were called; with JAX a function was called
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.onnx")
            with quiet("jax2onnx", "onnx_ir", "torch.onnx"):
                self.model.export(path, format="onnx", verbose=False)
            return onnx.load(path)

    def load_others(self, state: Mapping[str, np.ndarray]) -> None:
        self._refresh_model()
        self._set(self._shared.values(), [state[name] for name in self._shared])
        if self.memory is not None:
            self._store(self.memory)

    def local_state(self) -> dict[str, np.ndarray]:
        """Return the random state of layers."""
        own = {name: np.array(array_of(each)) for name, each in self._random.items()}
        return own | self._computing.random_state()

    def load_local_state(self, state: dict[str, np.ndarray]) -> None:
        if set(state) != set(self.local_state()):
            raise ModelFileError(f"the local state is of another model: {sorted(state)}, not {sorted(self._random)}")
        self._computing.load_random_state(state)
        for name, variable in self._random.items():
            assign(variable, state[name])

    def __deepcopy__(self, memo: Any) -> Replica:
        with explained(ArgumentError, f"this {type(self.model).__name__} can't be cloned by Keras"):
            model = keras.models.clone_model(self.model)  # a layer may have no configuration
            optimizer = self.optimizer_state.new_optimizer()
        copied = KerasReplica(model, self._loss, optimizer, self._metrics)
        copied.load_state(self.state())
        copied.load_local_state(self.local_state())
        return copied

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        if y is not None and {id(each) for each in self.model.trainable_variables} != {
            id(each) for each in self._trained
        }:
            raise ArgumentError(
                f"layers of {self.model.name} were frozen or unfrozen (trainable=) since this KerasReplica was made: "
                "make another KerasReplica, and a trainer, of the model as it is now"
            )
        with feeding(f"{self.model.name}, the loss or a metric", x, y):
            given = [None if each is None else sliced(each, slice(1)) for each in (x, y, weights)]
            first, target, own = self._inputs(*given)
            output = self._computing.output(first)
            if y is not None:
                self._measured(target, keras.tree.map_structure(keras.ops.convert_to_tensor, output), [], own)
                if self.divided:
                    self._check_mask(first)

    # Inside

    def _check_mask(self, first: Any) -> None:
        """Raise ArgumentError if the output has a mask, of which a Loss of Keras makes weights. first: a row."""
        if isinstance(self._loss, keras.losses.Loss):
            outputs = keras.tree.flatten(self.model(first, **self._computing.using))
            if any(getattr(each, "_keras_mask", None) is not None for each in outputs):
                raise ArgumentError(
                    f"the output of {self.model.name} has a mask (of Masking, or Embedding(mask_zero=True)): the loss "
                    f"{type(self._loss).__name__} divides by the steps that a rank has not masked, which differ "
                    "between ranks; give the loss as a function, such as keras.losses.mean_squared_error"
                )

    def _refresh_model(self) -> None:
        """Copy the parameters from the trainer's memory, where other ranks may have changed them, into the model."""
        if self.memory is not None:
            self._set(self._trained, self._layout.views(self.memory)[: len(self._trained)])

    def _load_statistics(self, flat: np.ndarray) -> None:
        self._set(self._statistics, self._layout.views(flat)[len(self._trained) :])

    def _store(self, buffer: np.ndarray) -> None:
        """Copy parameters and statistics into the trainer's memory."""
        self._layout.write(map(array_of, [*self._trained, *self._statistics]), buffer)

    def _inputs(self, x: Tree, *others: Tree) -> list[Any]:
        """Return x, y and weights as the model and the loss take them."""
        found: list[Any] = [None if tree is None else mapped(self._input, tree) for tree in (x, *others)]
        if self._takes_list and isinstance(x, tuple):
            found[0] = list(found[0])
        return found

    def _input(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.gradient_dtype, copy=False) if array.dtype.kind == "f" else array

    @staticmethod
    def _set(variables: Iterable[Any], arrays: Iterable[np.ndarray]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            assign(variable, array)

    def _measured(self, y: Any, output: Any, losses: Sequence[Any], weights: Any = None) -> tuple[Any, Any]:
        y = keras.tree.map_structure(keras.ops.convert_to_tensor, y)
        loss = keras.ops.mean(self._loss(y, output)) if weights is None else self._weighted(y, output, weights)
        for each in losses:
            loss = loss + keras.ops.cast(each, loss.dtype)
        means = [keras.ops.mean(keras.ops.cast(each(y, output), "float32")) for each in self._metrics.values()]
        return loss, keras.ops.stack([keras.ops.cast(loss, "float32"), *means])

    def _weighted(self, y: Any, output: Any, weights: Any) -> Any:
        """Return the mean over the rows of their weighted losses. Raises ArgumentError if the loss has no rows."""
        if isinstance(self._loss, keras.losses.Loss):
            if self._loss.reduction == "mean_with_sample_weight":
                raise ArgumentError(
                    'the loss has reduction="mean_with_sample_weight", which divides by the sum of the weights of a '
                    'rank; use "sum_over_batch_size", which divides by the number of rows'
                )
            return keras.ops.mean(self._loss(y, output, sample_weight=weights))
        losses = self._loss(y, output)
        if not len(losses.shape):
            raise ArgumentError(
                "sample_weight and class_weight need the loss of each row, and this function returns one number: use a "
                "loss of keras.losses, or return the losses of the rows"
            )
        if len(losses.shape) > 1:
            losses = keras.ops.mean(losses, axis=tuple(range(1, len(losses.shape))))
        return keras.ops.mean(losses * keras.ops.cast(weights, losses.dtype))


def _scores_of(loss: Any) -> str:
    if loss in (keras.losses.sparse_categorical_crossentropy, keras.losses.categorical_crossentropy):
        return "probabilities"
    logits = getattr(loss, "from_logits", None) if isinstance(loss, CROSS_ENTROPIES) else None
    return "" if logits is None else "logits" if logits else "probabilities"


def _name_of(loss: Any) -> str:
    """As Replica.loss_name: Keras' own losses are means over the rows."""
    kind = type(loss) if isinstance(loss, keras.losses.Loss) else loss
    if str(getattr(kind, "__module__", "")).partition(".")[0] == "keras":
        return ""
    return getattr(loss, "__name__", type(loss).__name__)


def _loss_of(loss: Any) -> Any:
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    if getattr(found, "reduction", "mean") == "sum":
        raise ArgumentError('the loss has reduction="sum"; rows are weighted here, so leave it out')
    return found


def _trained_of(model: Any) -> list[Any]:
    if not isinstance(model, keras.Model):
        raise ArgumentError(
            f"KerasReplica takes a keras.Model, not {type(model).__module__}.{type(model).__qualname__}"
        )
    if not model.built:
        raise ArgumentError(
            f"{model.name} is not built: begin it with a keras.Input(shape), or call model.build(shape) first"
        )
    if keras.backend.backend() not in COMPUTING:
        raise ArgumentError(
            f"Keras' backend {keras.backend.backend()!r} computes no gradients: set KERAS_BACKEND=jax, for example"
        )
    kinds = {keras.backend.standardize_dtype(variable.dtype) for variable in model.trainable_variables}
    if len(kinds) != 1 or not kinds <= set(DTYPES):
        raise ArgumentError(
            f"the trained variables must have one dtype of {', '.join(DTYPES)}, and are "
            f"{', '.join(sorted(kinds)) or 'none'}"
        )
    return list(model.trainable_variables)


def _statistics_of(model: Any, dtype: str) -> list[Any]:
    """Return the moving means and variances of batch norm, which every rank computes from its own rows."""
    flat = methodcaller("_flatten_layers")(model)  # Keras has no public name of it
    layers = [layer for layer in flat if isinstance(layer, keras.layers.BatchNormalization)]
    found = [each for layer in layers if layer.trainable for each in (layer.moving_mean, layer.moving_variance)]
    return [each for each in found if keras.backend.standardize_dtype(each.dtype) == dtype]
