"""A small network of dense layers on NumPy or CuPy arrays: one code for both, float32, nothing else installed.

All parameters lie in one flat buffer and all gradients in another, the one that the backend allocated;
layers hold views. A step writes gradients where they are reduced, and the optimizer reads them there.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainers.errors import ArgumentError, ModelFileError
from trainers.files import model_file
from trainers.replica import Replica
from trainers.replicas.numpy.losses import LOSSES
from trainers.replicas.numpy.optimizers import OPTIMIZERS, Optimizer

FLOAT = np.dtype(np.float32)


class Activation(NamedTuple):
    """apply: overwrites z with the activation. derive: overwrites activations with the derivative there."""

    apply: Callable[[Any, Any], None]
    derive: Callable[[Any, Any], None]
    init: str  # the initialisation that suits it


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
    "relu": Activation(_relu, _relu_derivative, "he"),
    "tanh": Activation(_tanh, _tanh_derivative, "glorot"),
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


class NumpyNetwork(Replica):
    """Dense layers with an activation between them, a loss and an optimizer.

    sizes: features, hidden layers, outputs: [64, 64, 32, 10].
    activation: "relu" or "tanh".
    loss: "softmax_cross_entropy" (labels are class numbers, predictions are probabilities) or
        "mean_squared_error" (targets of shape (rows, outputs), predictions are numbers).
    optimizer: "sgd", "momentum" or "adam", with the learning rate `lr` (by default 0.1, 0.05 and 0.001);
        or an optimizer object.
    init: "he" or "glorot"; by default the one that suits the activation. Biases start at 0.
    seed: of the initial weights; they are the same on a CPU and on a GPU.
    device: "cpu", or "cuda" for CuPy's current device.

    Samples may have any shape with sizes[0] elements: they are flattened, then `scale_input` applies.
    Raises ArgumentError.
    """

    essentials: tuple[str, ...] = ("activation", "loss")
    allocates = False

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
        self._names = {"activation": activation, "loss": loss}
        self._activation = choose("activation", activation, ACTIVATIONS)
        self._loss = choose("loss", loss, LOSSES)(self._xp)
        self.metrics = self._loss.metrics
        self.optimizer = make_optimizer(optimizer, lr)
        self.gradient_length = length_of(self.sizes)
        self.parameters = self._xp.asarray(self._initial(init or self._activation.init, seed))
        self._layers = self._views(self.parameters)
        self._values = self._xp.zeros(len(self.metrics))
        self.scale_input(0.0, 1.0)
        self._capacity = -1
        self._reserve(0)
        self.bind(self._xp.zeros(self.gradient_length, FLOAT))

    @classmethod
    def load(cls, path: str, device: str = "cpu") -> "NumpyNetwork":
        """The network in `path`, which `save` wrote, ready to predict or to go on training. Needs no MPI.

        Raises ModelFileError.
        """
        config, state = model_file.read(path, cls.__name__)
        try:
            sizes, names = checked_sizes(config.pop("sizes")), {name: config.pop(name) for name in cls.essentials}
            optimizer = OPTIMIZERS[config.pop("optimizer")](**config.pop("optimizer_options"))
            if config or state["parameters"].size != length_of(sizes):  # before memory is taken for such sizes
                raise ArgumentError(f"{state['parameters'].size} parameters, sizes {sizes}, {config or 'nothing else'}")
            cls._check_saved(sizes, names, state)
            network = cls(sizes, **names, optimizer=optimizer, device=device)
        except (TypeError, KeyError, OverflowError, ArgumentError) as error:
            raise ModelFileError(f"{path} describes no network that this version knows: {error!r}") from error
        network.load_state(state)
        return network

    @classmethod
    def _check_saved(cls, sizes: list[int], names: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        """Raise ArgumentError or KeyError where the state of a saved network can't be that of one made so."""

    def scale_input(self, shift: Any, scale: Any) -> None:
        """From now on the network sees (x - shift) * scale; scalars, or one number a feature.

        It is saved with the model, so that a loaded model predicts from raw samples.
        """
        try:
            self._shift, self._scale = (self._per_feature(given) for given in (shift, scale))
        except ValueError as error:
            raise ArgumentError(f"shift and scale must be numbers or {self.sizes[0]} numbers: {error}") from error
        self._scales_input = bool((self._shift != 0).any() or (self._scale != 1).any())

    # What a trainer calls

    @property
    def elementwise(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"optimizer.{name}" for name in self.optimizer.slots)

    @property
    def learning_rates(self) -> list[float]:
        return [self.optimizer.lr]

    @learning_rates.setter
    def learning_rates(self, rates: Sequence[float]) -> None:
        (self.optimizer.lr,) = rates

    @property
    def updated(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.elementwise, "optimizer.steps")

    def bind(self, buffer: Any) -> None:
        self._check_buffer("gradient", buffer)
        self._gradients = buffer
        self._gradient_layers = self._views(buffer)
        self.optimizer.bind(self._xp, self.parameters, buffer)

    def bind_parameters(self, buffer: Any) -> None:
        self._check_buffer("parameter", buffer)
        buffer[:] = self.parameters
        self.parameters = buffer
        self._layers = self._views(buffer)
        self.optimizer.bind(self._xp, buffer, self._gradients)

    def gradients(self, x: np.ndarray, y: np.ndarray, share: float) -> Any:
        rows = len(x)
        if rows == 0:
            self._gradients[:] = self._values[:] = 0
            return self._values
        outputs = self._forward(x)
        targets = self._loss.targets(y)
        self._loss.measure(outputs[-1], targets, self._values)
        self._values /= rows
        self._loss.derive(outputs[-1], targets, share / rows)
        self._backward(outputs)
        return self._values

    def update(self, part: slice | None = None) -> None:
        self.optimizer.step(part)

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> Any:
        self._loss.measure(self._forward(x)[-1], self._loss.targets(y), self._values)
        return self._values

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, or the outputs with a mean squared error; (rows, outputs) float32."""
        if len(x) == 0:
            return np.zeros((0, self.sizes[-1]), FLOAT)
        output = self._forward(x)[-1]
        self._loss.predict(output)
        return output.copy() if self._xp is np else output.get()

    def state(self) -> dict[str, np.ndarray]:
        held = {"parameters": self.parameters, "input.shift": self._shift, "input.scale": self._scale}
        held |= {f"optimizer.{name}": array for name, array in self.optimizer.state.items()}
        held |= {"optimizer.steps": np.array(self.optimizer.steps), "sizes": np.array(self.sizes)}
        return {name: array.get() if hasattr(array, "get") else array for name, array in held.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for number, (inputs, outputs) in enumerate(itertools.pairwise(self.sizes), 1):
            found |= {f"layer {number} weights": (inputs, outputs), f"layer {number} bias": (outputs,)}
        return found

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        try:
            parameters, steps = state["parameters"], int(state["optimizer.steps"])
            shift, scale, sizes = state["input.shift"], state["input.scale"], state["sizes"].reshape(-1).tolist()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelFileError(f"this is no state of a NumpyNetwork: {error!r}") from error
        if sizes != self.sizes or parameters.shape != self.parameters.shape:
            given, here = ("-".join(map(str, each)) for each in (sizes, self.sizes))
            raise ModelFileError(f"the saved model is a network of sizes {given}, and this one has {here}")
        slots = {name[10:]: array for name, array in state.items() if name.startswith("optimizer.")}
        del slots["steps"]
        numeric = all(array.dtype.kind in "fi" for array in (parameters, shift, scale, *slots.values()))
        if steps < 0 or not numeric or {shift.shape, scale.shape} != {(self.sizes[0],)}:
            found = f"{steps} steps, shift {shift.dtype}{shift.shape}, scale {scale.dtype}{scale.shape}"
            raise ModelFileError(f"this is no state of a NumpyNetwork: parameters {parameters.dtype}, {found}")
        self.optimizer.load(steps, slots)
        self.parameters[:] = self._xp.asarray(parameters)
        self.scale_input(shift, scale)

    def config(self) -> dict[str, Any]:
        kind = type(self.optimizer)  # one of the user's own goes by its class; `restore` takes it, `load` can't know it
        name = next((name for name, known in OPTIMIZERS.items() if known is kind), kind.__name__)
        options = self.optimizer.config()
        return {"sizes": self.sizes, **self._names, "optimizer": name, "optimizer_options": options}

    def check(self, x: np.ndarray, y: np.ndarray | None) -> None:
        features = int(np.prod(x.shape[1:]))
        if x.dtype.kind not in "iufb" or x.ndim == 0 or features != self.sizes[0]:
            raise ArgumentError(
                f"x must be numbers with {self.sizes[0]} features a row, as the network has; it is {x.dtype} of "
                f"shape {x.shape}, {features} features a row"
            )
        if y is not None:
            self._loss.check(y, self.sizes[-1])

    def check_batch(self, x: np.ndarray, y: np.ndarray) -> None:
        self.check(x, y)

    # Inside

    def _forward(self, x: np.ndarray) -> list[Any]:
        """The input, and the output of every layer, in scratch memory; the last output without an activation."""
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
        xp = self._xp
        delta = outputs[-1]
        for index in range(len(self._layers) - 1, -1, -1):
            below = outputs[index]
            weights, bias = self._gradient_layers[index]
            xp.dot(below.T, delta, out=weights)
            xp.sum(delta, axis=0, out=bias)
            if index:
                passed = self._deltas[index - 1][: len(below)]
                xp.dot(delta, self._layers[index][0].T, out=passed)
                self._activation.derive(xp, below)
                passed *= below
                delta = passed
        self._derive_input(delta)

    def _derive_input(self, delta: Any) -> None:
        """Hook for layers below the first one, of whose output `delta` is the derivative."""

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
        """Have scratch memory for so many rows: allocated for the largest batch, then used again."""
        if rows <= self._capacity:
            return
        self._capacity = rows
        self._inputs = self._xp.empty((rows, self.sizes[0]), FLOAT)
        self._outputs = [self._xp.empty((rows, size), FLOAT) for size in self.sizes[1:]]
        self._deltas = [self._xp.empty((rows, size), FLOAT) for size in self.sizes[1:-1]]

    def _views(self, buffer: Any) -> list[tuple[Any, Any]]:
        """The (inputs, outputs) weights and the (outputs,) bias of each layer, as views of a flat buffer."""
        layers, start = [], 0
        for inputs, outputs in itertools.pairwise(self.sizes):
            end = start + inputs * outputs
            layers.append((buffer[start:end].reshape(inputs, outputs), buffer[end : end + outputs]))
            start = end + outputs
        return layers

    def _initial(self, init: str, seed: int) -> np.ndarray:
        draw = choose("init", init, INITIALISATIONS)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ArgumentError(f"seed must be an integer >= 0, got {seed!r}")
        random = np.random.default_rng(seed)
        parameters = np.zeros(self.gradient_length, FLOAT)
        for weights, _ in self._views(parameters):
            weights[:] = draw(random, *weights.shape)
        return parameters

    def _per_feature(self, given: Any) -> Any:
        return self._xp.asarray(np.broadcast_to(np.asarray(given, FLOAT), (self.sizes[0],)).copy())


# The constructor's arguments


def checked_sizes(sizes: Sequence[int]) -> list[int]:
    checked = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else []
    if len(checked) < 2 or not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1 for size in checked
    ):
        raise ArgumentError(f"sizes={sizes!r} describes no network: give features, hidden layers and outputs, >= 1")
    return [int(size) for size in checked]


def length_of(sizes: Sequence[int]) -> int:
    """The number of parameters: weights and biases of each layer."""
    return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))


def choose(what: str, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise ArgumentError(f"{what}={name!r} is unknown; use one of {', '.join(table)}")
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
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError(
            f'device="cuda" needs CuPy ({error}); pip install ".[cuda12]" or ".[cuda13]" in the checkout'
        ) from error
    return cupy
