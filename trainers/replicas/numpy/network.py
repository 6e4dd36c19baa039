"""A small network of dense layers on NumPy or CuPy arrays: the same code for both, in float32.

All parameters are in one flat buffer, all gradients in another, which the backend allocated; layers hold views of both.
Gradients are written, reduced and read by the optimizer in the same memory.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainers.arguments import integer, is_integer, name_error, require
from trainers.arrays.average import on_host
from trainers.data import Tree
from trainers.errors import ArgumentError, ModelFileError, needing
from trainers.files import model_file
from trainers.files.onnx_graph import FREE, Graph
from trainers.replica import ALL, Slices, columns_of
from trainers.replicas.flat import FlatReplica, Layout
from trainers.replicas.numpy.losses import LOSSES
from trainers.replicas.numpy.optimizers import OPTIMIZERS, STEPS, Optimizer

FLOAT = np.dtype(np.float32)
INPUT = "x"  # its name in the graph of `to_onnx`


class Activation(NamedTuple):
    """apply: overwrites z with the activations. derive: overwrites activations with the derivatives at them."""

    apply: Callable[[Any, Any], None]
    derive: Callable[[Any, Any], None]
    init: str  # the default initialisation of layers with this activation
    operator: str  # of ONNX


def _relu(xp: Any, z: Any) -> None:
    xp.maximum(z, 0, out=z)


def _relu_derivative(xp: Any, a: Any) -> None:
    xp.sign(a, out=a)  # activations are never negative, so this is 0 or 1


def _tanh(xp: Any, z: Any) -> None:
    xp.tanh(z, out=z)


def _tanh_derivative(xp: Any, a: Any) -> None:
    xp.multiply(a, a, out=a)
    xp.subtract(1, a, out=a)


ACTIVATIONS = {
    "relu": Activation(_relu, _relu_derivative, "he", "Relu"),
    "tanh": Activation(_tanh, _tanh_derivative, "glorot", "Tanh"),
}


def he(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Normal with variance 2 / fan_in. K. He et al.: Delving deep into rectifiers, 2015."""
    return random.normal(0.0, np.sqrt(2.0 / rows), (rows, columns))


def glorot(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Uniform with variance 2 / (fan_in + fan_out). X. Glorot, Y. Bengio: Understanding the difficulty of
    training deep feedforward neural networks, 2010."""
    limit = np.sqrt(6.0 / (rows + columns))
    return random.uniform(-limit, limit, (rows, columns))


INITIALISATIONS = {"he": he, "glorot": glorot}


class NumpyNetwork(FlatReplica):
    """Dense layers with an activation between them, a loss and an optimizer.

    sizes: features, hidden layers, outputs: [64, 64, 32, 10].
    activation: "relu" or "tanh".
    loss: "softmax_cross_entropy" (labels are class numbers, predictions are probabilities) or
        "mean_squared_error" (targets of shape (rows, outputs), predictions are numbers).
    optimizer: "sgd", "momentum" or "adam", with the learning rate `lr` (by default 0.1, 0.05 and 0.001);
        or an optimizer object.
    init: "he" or "glorot"; default: "he" for relu, "glorot" for tanh. Biases start at 0.
    seed: of the initial weights; they are the same on a CPU and on a GPU.
    device: "cpu", or "cuda" for CuPy's current device.

    Samples may have any shape with sizes[0] elements: they are flattened, then `scale_input` applies.
    Raises ArgumentError.
    """

    essentials: tuple[str, ...] = ("activation", "loss")
    allocates = False
    takes_weights = checks_batches = True
    _own_names: Mapping[str, Any] = {}  # of a subclass: what `essentials` adds, as JSON types

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        loss: str = "softmax_cross_entropy",
        optimizer: str | Optimizer = "adam",
        lr: float | None = None,
        init: str | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.sizes = checked_sizes(sizes)
        self.device = device
        self._xp = array_module(device)
        self._names = {"activation": activation, "loss": loss, **self._own_names}
        self._activation = choose("activation", activation, ACTIVATIONS)
        self._loss = choose("loss", loss, LOSSES)(self._xp)
        self.metrics, self.probabilities = self._loss.metrics, self._loss.probabilities
        self.scores = "probabilities" if self.probabilities else ""
        self.features = self.sizes[0]
        self.shapes = self._shapes_of(self.sizes, self._names)
        self._layout = Layout(self.shapes.values())
        self.optimizer = self.optimizer_state = make_optimizer(optimizer, lr)
        self.gradient_length = self._layout.length
        self.memory = self._own = self._xp.asarray(self._initial(init or self._activation.init, seed))
        self._values = self._xp.zeros(len(self.metrics))
        self.scale_input(0.0, 1.0)
        self._capacity = -1
        self._reserve(0)
        self.bind(None, self._xp.zeros(self.gradient_length, FLOAT))

    @classmethod
    def load(cls, path: str, device: str = "cpu") -> "NumpyNetwork":
        """Load a network that `save` wrote, to predict or to continue training. Needs no MPI.

        Raises ModelFileError.
        """
        return cls.of_saved(path, *model_file.read(path, cls.__name__), device)

    @classmethod
    def of_saved(
        cls, path: str, config: dict[str, Any], state: dict[str, np.ndarray], device: str = "cpu"
    ) -> "NumpyNetwork":
        """Make a network of a config and a state that were read from `path`, whose name is for errors.
        Raises ModelFileError."""
        columns = columns_of(path, config)
        try:
            sizes, names = checked_sizes(config.pop("sizes")), {name: config.pop(name) for name in cls.essentials}
            optimizer = OPTIMIZERS[config.pop("optimizer")](**config.pop("optimizer_options"))
            shapes = cls._shapes_of(sizes, names).values()
            size = sum(map(math.prod, shapes))  # checked before memory is allocated for these sizes
            if config or state["parameters"].size != size:
                raise ArgumentError(f"{state['parameters'].size} parameters, sizes {sizes}, {config or 'nothing else'}")
            network = cls(sizes, **names, optimizer=optimizer, device=device)
        except (TypeError, KeyError, OverflowError, ArgumentError) as error:
            raise ModelFileError(f"{path} describes no network that this version supports: {error!r}") from error
        network.load_state(state)
        network.columns = columns
        return network

    @classmethod
    def _shapes_of(cls, sizes: list[int], names: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a network of these sizes and names, first weights and bias of each
        layer. Raises ArgumentError or KeyError."""
        found: dict[str, tuple[int, ...]] = {}
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
            found |= {f"layer {number} weights": (inputs, outputs), f"layer {number} bias": (outputs,)}
        return found

    def scale_input(self, shift: Any, scale: Any) -> None:
        """Scale the input: the network computes on (x - shift) * scale. shift, scale: scalars, or one number per
        feature.

        Both are saved with the model, so that a loaded model takes raw samples.
        """
        try:
            self._shift, self._scale = (self._per_feature(given) for given in (shift, scale))
        except ValueError as error:
            raise ArgumentError(f"shift and scale must be numbers or {self.sizes[0]} numbers: {error}") from error
        self._scales_input = bool((self._shift != 0).any() or (self._scale != 1).any())

    # Methods of Replica

    def bind(self, parameters: Any, gradients: Any) -> None:
        super().bind(parameters, gradients)
        self._own = self._own if self.memory is self._own else None
        self.parameters = self.memory
        self._arrays, self._slopes = map(self._layout.views, (self.memory, gradients))
        self._layers, self._gradient_layers = self._pairs(self._arrays), self._pairs(self._slopes)
        self.optimizer.bind(self._xp, self.memory, gradients)

    def _leave(self) -> Any:
        if self._own is None:
            self._own = self.memory.copy()
        return self._own

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float, weights: np.ndarray | None = None) -> Any:
        rows = len(x)
        if rows == 0:
            self._buffer[:] = self._values[:] = 0
            return self._values
        outputs = self._forward(x)
        targets, weights = self._loss.targets(y), self._weights(weights)
        self._loss.measure(outputs[-1], targets, self._values, weights)
        self._values /= rows
        self._loss.derive(outputs[-1], targets, share / rows if weights is None else weights[:, None] * (share / rows))
        self._backward(outputs)
        return self._values

    def _weights(self, weights: np.ndarray | None) -> Any:
        return None if weights is None else self._xp.asarray(weights, FLOAT)

    def update(self, part: Slices = ALL) -> None:
        self.optimizer.step(None if part == ALL else part)

    def evaluate(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> Any:
        self._loss.measure(self._forward(x)[-1], self._loss.targets(y), self._values, self._weights(weights))
        return self._values

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return class probabilities, or the outputs if the loss is mean_squared_error; (rows, outputs) float32."""
        if len(x) == 0:
            return np.zeros((0, self.sizes[-1]), FLOAT)
        output = self._forward(x)[-1]
        self._loss.predict(output)
        return output.copy() if self._xp is np else output.get()

    def others(self) -> dict[str, np.ndarray]:
        held = {"input.shift": on_host(self._shift), "input.scale": on_host(self._scale)}
        return held | {"sizes": np.array(self.sizes)}

    def state_error(self, state: Mapping[str, np.ndarray]) -> str:
        try:
            steps, sizes = int(state[STEPS]), state["sizes"].reshape(-1).tolist()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return f"this is not the state of a NumpyNetwork: {error!r}"
        if sizes != self.sizes:
            given, here = ("-".join(map(str, each)) for each in (sizes, self.sizes))
            return f"the saved model is a network of sizes {given}, and this one has {here}"
        dtypes = {name: array.dtype for name, array in state.items() if array.dtype.kind not in "fi"}
        if steps < 0 or dtypes:
            return f"this is not the state of a NumpyNetwork: {steps} steps, {dtypes or 'all numbers'}"
        return ""

    def load_others(self, state: Mapping[str, np.ndarray]) -> None:
        self.scale_input(state["input.shift"], state["input.scale"])

    def to_onnx(self, x: Tree) -> Any:
        graph = Graph()
        last = self._graph_of_input(graph, INPUT)
        for number, (weights, bias) in enumerate(self._layers, 1):
            last = graph.add("Gemm", last, *map(on_host, (weights, bias)))
            if number < len(self._layers):
                last = graph.add(ACTIVATIONS[self._names["activation"]].operator, last)
        if self.probabilities:
            last = graph.add("Softmax", last, axis=1)
        given = graph.value(INPUT, FLOAT, [FREE, self.features])
        return graph.model([given], [graph.value(last, FLOAT, [FREE, self.sizes[-1]])])

    def _graph_of_input(self, graph: Graph, given: str) -> str:
        """Add `_input` to a graph. given, returned: names of values."""
        if not self._scales_input:
            return given
        return graph.add("Mul", graph.add("Sub", given, on_host(self._shift)), on_host(self._scale))

    def drawn_rows(self, count: int) -> Tree:
        drawn = np.random.default_rng(0).standard_normal((count, self.sizes[0]), FLOAT)
        with np.errstate(all="ignore"):  # a feature that never changes may have the scale 0
            found = on_host(self._shift) + drawn / np.where(on_host(self._scale) == 0, 1, on_host(self._scale))
        return found.astype(FLOAT)

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        # a user's optimizer is saved by its class name: `restore` accepts it, `load` can't create it
        kind = type(self.optimizer)
        name = next((name for name, each in OPTIMIZERS.items() if each is kind), kind.__name__)
        options = self.optimizer.config()
        return {"sizes": self.sizes, **self._names, "optimizer": name, "optimizer_options": options}

    def check(self, x: Tree, y: Tree | None, weights: np.ndarray | None = None) -> None:
        self._check_single(x, y)
        features = int(np.prod(x.shape[1:]))
        if x.dtype.kind not in "iufb" or x.ndim == 0 or features != self.sizes[0]:
            raise ArgumentError(
                f"x must be numbers with {self.sizes[0]} features a row, as the network has, not {x.dtype} of "
                f"shape {x.shape}, {features} features a row"
            )
        if y is not None:
            self._loss.check(y, self.sizes[-1])

    def _check_single(self, x: Tree, y: Tree | None) -> None:
        """Raise ArgumentError unless x and y are one array each."""
        for name, given in (("x", x), ("y", y)):
            if isinstance(given, tuple | dict):
                raise ArgumentError(
                    f"a {type(self).__name__} takes one array as {name}, and got a {type(given).__name__} of "
                    f"{len(given)}: concatenate them (np.concatenate([a, b], axis=1)), or use a TorchReplica, "
                    "JaxReplica or KerasReplica of a model with several"
                )

    # Inside

    def _forward(self, x: np.ndarray) -> list[Any]:
        """Compute and return [input, output of each layer], in scratch memory; the last output has no activation."""
        xp, rows = self._xp, len(x)
        self._reserve(rows)
        outputs = [self._input(x)]
        last = len(self._layers) - 1
        for index, (weights, bias) in enumerate(self._layers):
            z = self._outputs[index][:rows]
            xp.dot(outputs[-1], weights, out=z)
            z += bias
            if index < last:
                self._activation.apply(xp, z)
            outputs.append(z)
        return outputs

    def _backward(self, outputs: list[Any]) -> None:
        """Fill the gradients from the derivative in outputs[-1]; all outputs but the input are overwritten."""
        xp, delta, rows = self._xp, outputs[-1], len(outputs[-1])
        for index in range(len(self._layers) - 1, -1, -1):
            weights, bias = self._gradient_layers[index]
            xp.dot(outputs[index].T, delta, out=weights)
            xp.sum(delta, axis=0, out=bias)
            if index:
                below, passed = outputs[index], self._deltas[index - 1][:rows]
                xp.dot(delta, self._layers[index][0].T, out=passed)
                self._activation.derive(xp, below)
                passed *= below
                delta = passed
        self._derive_input(delta)

    def _derive_input(self, delta: Any) -> None:
        """Hook for subclasses with a layer below the first one. delta: the derivative by the first layer's output."""

    def _input(self, x: np.ndarray) -> Any:
        flat = self._xp.asarray(x.reshape(len(x), -1))
        if not self._scales_input and flat.dtype == FLOAT:
            return flat
        scaled = self._inputs[: len(x)]
        scaled[...] = flat
        if self._scales_input:
            scaled -= self._shift
            scaled *= self._scale
        return scaled

    def _reserve(self, rows: int) -> None:
        """Allocate scratch memory for `rows` rows, unless a larger batch has done so."""
        if rows <= self._capacity:
            return
        self._capacity = rows
        self._inputs = self._xp.empty((rows, self.sizes[0]), FLOAT)
        self._outputs = [self._xp.empty((rows, size), FLOAT) for size in self.sizes[1:]]
        self._deltas = [self._xp.empty((rows, size), FLOAT) for size in self.sizes[1:-1]]

    def _pairs(self, views: list[Any]) -> list[tuple[Any, Any]]:
        """Return the weights (inputs, outputs) and the bias (outputs,) of each layer, of views of flat memory."""
        last = 2 * (len(self.sizes) - 1)
        return list(zip(views[0:last:2], views[1:last:2], strict=True))

    def _initial(self, init: str, seed: int) -> np.ndarray:
        draw = choose("init", init, INITIALISATIONS)
        require(integer(0).error("seed", seed))
        random = np.random.default_rng(seed)
        parameters = np.zeros(self.gradient_length, FLOAT)
        for weights, _ in self._pairs(self._layout.views(parameters)):
            weights[:] = draw(random, *weights.shape)
        return parameters

    def _per_feature(self, given: Any) -> Any:
        return self._xp.asarray(np.broadcast_to(np.asarray(given, FLOAT), (self.sizes[0],)).copy())


# The constructor's arguments


def checked_sizes(sizes: Sequence[int]) -> list[int]:
    checked = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else []
    if len(checked) < 2 or not all(is_integer(size, 1) for size in checked):
        raise ArgumentError(f"sizes={sizes!r} describes no network: give features, hidden layers and outputs, >= 1")
    return [int(size) for size in checked]


def choose(what: str, name: str, table: dict[str, Any]) -> Any:
    require(name_error(what, name, table))
    return table[name]


def make_optimizer(optimizer: str | Optimizer, lr: float | None) -> Optimizer:
    if isinstance(optimizer, str):
        return choose("optimizer", optimizer, OPTIMIZERS)(lr)
    if not isinstance(optimizer, Optimizer):
        found = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise ArgumentError(
            f"optimizer: give {', '.join(OPTIMIZERS)}, or an optimizer of trainers.replicas.numpy.optimizers, not "
            f"{found.__module__}.{found.__qualname__}"
        )
    if lr is not None:
        raise ArgumentError(
            f"lr={lr} belongs to an optimizer's name; {type(optimizer).__name__} has its own, {optimizer.lr}"
        )
    return optimizer


def array_module(device: str) -> Any:
    if device == "cpu":
        return np
    if device != "cuda":
        raise ArgumentError(f'device={device!r} is unknown; use "cpu" or "cuda"')
    with needing('device="cuda" needs CuPy ({}); pip install ".[cuda12]" or ".[cuda13]" in the checkout'):
        import cupy
    return cupy
