"""Gradients and compiled functions, which Keras leaves to its backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import keras
import numpy as np

Measured = Callable[[Any, Any, Sequence[Any]], tuple[Any, Any]]
Step = Callable[[list[np.ndarray]], None]


class Computing(ABC):
    """The gradients and the output of a model, with one of Keras' backends.

    measured: measured(y, output, losses of layers) -> (loss, metrics as one tensor, the loss first).
    """

    def __init__(self, model: Any, measured: Measured) -> None:
        self.model, self.measured = model, measured
        self.trained, self.others = model.trainable_variables, model.non_trainable_variables
        takes_training = attrgetter("_call_has_training_arg")(model)  # Keras has no public name of it
        self.training, self.using = ({"training": flag} if takes_training else {} for flag in (True, False))
        self.compile()

    def compile(self) -> None:  # noqa: B027, nothing to do where nothing is compiled
        """Prepare functions."""

    @abstractmethod
    def slopes(self, x: np.ndarray, y: np.ndarray, share: float) -> tuple[np.ndarray, list[Any]]:
        """The metrics, and `share` times the gradients: arrays, None for zeros. Layers' own variables change."""

    @abstractmethod
    def measures(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The metrics of a model in use."""

    @abstractmethod
    def output(self, x: np.ndarray) -> np.ndarray:
        """The output of a model in use."""

    def _measures_of(self, x: Any, y: Any) -> Any:
        return self.measured(y, self._output_of(x), self.model.losses)[1]

    def _output_of(self, x: Any) -> Any:
        return self.model(x, **self.using)

    def random_state(self) -> dict[str, np.ndarray]:
        """The state of random generators besides the model's own variables."""
        return {}

    def load_random_state(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027, nothing to do where there is none
        """Take on what `random_state` gave."""

    @staticmethod
    @abstractmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        """A function that updates variables by gradients, which it has read when it returns."""


class TorchComputing(Computing):
    """Eagerly."""

    def slopes(self, x: np.ndarray, y: np.ndarray, share: float) -> tuple[np.ndarray, list[Any]]:
        import torch

        output = self.model(x, **self.training)
        loss, values = self.measured(y, output, self.model.losses)
        leaves = [variable.value for variable in self.trained]
        slopes = torch.autograd.grad(loss * share, leaves, allow_unused=True)
        return _array(values), [None if slope is None else _array(slope) for slope in slopes]

    def measures(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return _array(self._measures_of(x, y))

    def output(self, x: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return keras.ops.convert_to_numpy(self._output_of(x))  # bfloat16 as float32

    def random_state(self) -> dict[str, np.ndarray]:
        import torch

        return {"random.torch": torch.get_rng_state().numpy()}

    def load_random_state(self, state: dict[str, np.ndarray]) -> None:
        import torch

        torch.set_rng_state(torch.from_numpy(np.array(state["random.torch"])))

    @staticmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        import torch

        def step(gradients: list[np.ndarray]) -> None:
            with torch.no_grad():
                device = variables[0].value.device
                optimizer.apply([torch.from_numpy(array).to(device) for array in gradients], variables)

        return step


class JaxComputing(Computing):
    """Compiled, for each number of rows."""

    def compile(self) -> None:
        import jax

        self._slopes, self._measures, self._output = map(
            jax.jit, (self._traced_slopes, self._traced_measures, self._traced_output)
        )

    def _values(self) -> tuple[list[Any], list[Any]]:
        return [variable.value for variable in self.trained], [variable.value for variable in self.others]

    def slopes(self, x: np.ndarray, y: np.ndarray, share: float) -> tuple[np.ndarray, list[Any]]:
        slopes, (values, others) = self._slopes(*self._values(), x, y, share)
        for variable, value in zip(self.others, others, strict=True):
            variable.assign(value)
        return np.asarray(values), [np.asarray(slope) for slope in slopes]

    def _traced_slopes(self, trained: Any, others: Any, x: Any, y: Any, share: Any) -> Any:
        import jax

        def shared(trained: Any) -> Any:
            output, changed, losses = self.model.stateless_call(trained, others, x, return_losses=True, **self.training)
            loss, values = self.measured(y, output, losses)
            return loss * share, (values, changed)

        return jax.grad(shared, has_aux=True)(trained)

    def measures(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(self._measures(*self._values(), x, y))

    def _traced_measures(self, trained: Any, others: Any, x: Any, y: Any) -> Any:
        output, _, losses = self.model.stateless_call(trained, others, x, return_losses=True, **self.using)
        return self.measured(y, output, losses)[1]

    def output(self, x: np.ndarray) -> np.ndarray:
        return np.array(self._output(*self._values(), x))

    def _traced_output(self, trained: Any, others: Any, x: Any) -> Any:
        return self.model.stateless_call(trained, others, x, **self.using)[0]

    @staticmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        import jax

        @jax.jit
        def updated(state: Any, gradients: Any, values: Any) -> Any:
            # Behind the barrier nothing that is returned can be the gradients, whose memory is the trainer's.
            return optimizer.stateless_apply(state, jax.lax.optimization_barrier(gradients), values)

        def step(gradients: list[np.ndarray]) -> None:
            held = [*variables, *optimizer.variables]
            state, values = [each.value for each in optimizer.variables], [each.value for each in variables]
            changed, state = jax.block_until_ready(updated(state, gradients, values))
            for variable, value in zip(held, [*changed, *state], strict=True):
                variable.assign(value)

        return step


class TensorflowComputing(Computing):
    """As graphs."""

    def compile(self) -> None:
        import tensorflow as tf

        self._slopes, self._measures, self._output = (
            tf.function(each, reduce_retracing=True) for each in (self._slopes_of, self._measures_of, self._output_of)
        )

    def slopes(self, x: np.ndarray, y: np.ndarray, share: float) -> tuple[np.ndarray, list[Any]]:
        values, slopes = self._slopes(x, y, np.float32(share))
        return values.numpy(), [None if slope is None else slope.numpy() for slope in slopes]

    def _slopes_of(self, x: Any, y: Any, share: Any) -> Any:
        import tensorflow as tf

        leaves = [variable.value for variable in self.trained]
        with tf.GradientTape() as tape:
            output = self.model(x, **self.training)
            loss, values = self.measured(y, output, self.model.losses)
            shared = loss * tf.cast(share, loss.dtype)
        slopes = tape.gradient(shared, leaves)
        return values, [None if slope is None else tf.convert_to_tensor(slope) for slope in slopes]

    def measures(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self._measures(x, y).numpy()

    def output(self, x: np.ndarray) -> np.ndarray:
        return self._output(x).numpy()

    @staticmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        import tensorflow as tf

        apply = tf.function(lambda gradients: optimizer.apply(gradients, variables))

        def step(gradients: list[np.ndarray]) -> None:
            apply([tf.constant(array) for array in gradients])  # copies, which the update may keep

        return step


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


COMPUTING: dict[str, type[Computing]] = {
    "jax": JaxComputing,
    "torch": TorchComputing,
    "tensorflow": TensorflowComputing,
}
"""By the names of Keras' backends that compute gradients."""


def array_of(variable: Any) -> np.ndarray:
    """The value of a Keras variable; may be a view, and read-only."""
    return keras.ops.convert_to_numpy(variable)


def assign(variable: Any, array: np.ndarray) -> None:
    """Set a Keras variable to a copy of an array, in the variable's shape."""
    variable.assign(np.array(array).reshape(variable.shape))


def stepper(optimizer: Any, variables: list[Any]) -> Step:
    """As Computing.stepper, with Keras' backend."""
    return COMPUTING[keras.backend.backend()].stepper(optimizer, variables)
