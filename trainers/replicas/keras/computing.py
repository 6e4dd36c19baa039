"""Gradients and compiled functions of a Keras model, one class for each Keras backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import keras
import numpy as np

Measured = Callable[[Any, Any, Sequence[Any], Any], tuple[Any, Any]]
Step = Callable[[list[np.ndarray]], None]


class Computing(ABC):
    """Computes gradients and outputs of a model with one Keras backend.

    measured: measured(y, output, losses of layers, weights of rows or None) -> (loss, metrics as one tensor, the loss
        first).
    """

    def __init__(self, model: Any, measured: Measured) -> None:
        self.model, self.measured = model, measured
        self.trained, self.others = model.trainable_variables, model.non_trainable_variables
        takes_training = attrgetter("_call_has_training_arg")(model)  # Keras has no public name of it
        self.training, self.using = ({"training": flag} if takes_training else {} for flag in (True, False))
        self._metrics, self._output = self.compiled(self._metrics_of), self.compiled(self._output_of)

    @abstractmethod
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors that computes no gradients, compiled where the backend compiles."""

    @abstractmethod
    def gradients(self, x: Any, y: Any, weights: Any, share: float) -> tuple[np.ndarray, list[Any]]:
        """Return the metrics, and the gradients times `share` (None: zeros). Updates the other variables of layers."""

    def metrics(self, x: Any, y: Any, weights: Any) -> np.ndarray:
        """Return the metrics in inference mode."""
        return array_of(self._metrics(*self._state(), x, y, weights))

    def output(self, x: Any) -> Any:
        """Return the model's output in inference mode on the host, arrays of its own; bfloat16 as float32."""
        return keras.tree.map_structure(lambda each: np.array(array_of(each)), self._output(*self._state(), x))

    def _state(self) -> tuple[Any, ...]:
        """Return the first arguments of compiled functions, if they get the values of variables."""
        return ()

    def _metrics_of(self, *given: Any) -> Any:
        x, y, weights = given
        return self.measured(y, self._output_of(x), self.model.losses, weights)[1]

    def _output_of(self, *given: Any) -> Any:
        return self.model(*given, **self.using)

    def random_state(self) -> dict[str, np.ndarray]:
        """Return the state of random generators that are not variables of the model."""
        return {}

    def load_random_state(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027, nothing to do where there is none
        """Load a result of `random_state`."""

    @staticmethod
    @abstractmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        """Return a function that updates the variables; when it returns, it no longer reads the gradients."""


class TorchComputing(Computing):
    """PyTorch, eager."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        return torch.no_grad()(function)

    def gradients(self, x: Any, y: Any, weights: Any, share: float) -> tuple[np.ndarray, list[Any]]:
        import torch

        output = self.model(x, **self.training)
        loss, values = self.measured(y, output, self.model.losses, weights)
        leaves = [variable.value for variable in self.trained]
        gradients = torch.autograd.grad(loss * share, leaves, allow_unused=True)
        return array_of(values), [None if gradient is None else array_of(gradient) for gradient in gradients]

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
    """JAX, compiled for each number of rows."""

    def __init__(self, model: Any, measured: Measured) -> None:
        super().__init__(model, measured)
        self._gradients = self.compiled(self._gradients_of)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import jax

        return jax.jit(function)

    def _state(self) -> tuple[Any, ...]:
        return [variable.value for variable in self.trained], [variable.value for variable in self.others]

    def gradients(self, x: Any, y: Any, weights: Any, share: float) -> tuple[np.ndarray, list[Any]]:
        gradients, (values, others) = self._gradients(*self._state(), x, y, weights, share)
        for variable, value in zip(self.others, others, strict=True):
            variable.assign(value)
        return np.asarray(values), [np.asarray(gradient) for gradient in gradients]

    def _gradients_of(self, trained: Any, others: Any, x: Any, y: Any, weights: Any, share: Any) -> Any:
        import jax

        def shared(trained: Any) -> Any:
            output, changed, losses = self.model.stateless_call(trained, others, x, return_losses=True, **self.training)
            loss, values = self.measured(y, output, losses, weights)
            return loss * share, (values, changed)

        return jax.grad(shared, has_aux=True)(trained)

    def _metrics_of(self, *given: Any) -> Any:
        trained, others, x, y, weights = given
        output, _, losses = self.model.stateless_call(trained, others, x, return_losses=True, **self.using)
        return self.measured(y, output, losses, weights)[1]

    def _output_of(self, *given: Any) -> Any:
        return self.model.stateless_call(*given, **self.using)[0]

    @staticmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        import jax

        @jax.jit
        def updated(state: Any, gradients: Any, values: Any) -> Any:
            # The barrier keeps XLA from returning the gradients' memory, which belongs to the trainer.
            return optimizer.stateless_apply(state, jax.lax.optimization_barrier(gradients), values)

        def step(gradients: list[np.ndarray]) -> None:
            held = [*variables, *optimizer.variables]
            state, values = [each.value for each in optimizer.variables], [each.value for each in variables]
            changed, state = jax.block_until_ready(updated(state, gradients, values))
            for variable, value in zip(held, [*changed, *state], strict=True):
                variable.assign(value)

        return step


class TensorflowComputing(Computing):
    """TensorFlow, as graphs."""

    def __init__(self, model: Any, measured: Measured) -> None:
        super().__init__(model, measured)
        self._gradients = self.compiled(self._gradients_of)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        made: Callable[..., Any] = tf.function(function, reduce_retracing=True)
        return made

    def gradients(self, x: Any, y: Any, weights: Any, share: float) -> tuple[np.ndarray, list[Any]]:
        values, gradients = self._gradients(x, y, weights, np.float32(share))
        return values.numpy(), [None if gradient is None else gradient.numpy() for gradient in gradients]

    def _gradients_of(self, x: Any, y: Any, weights: Any, share: Any) -> Any:
        import tensorflow as tf

        leaves = [variable.value for variable in self.trained]
        with tf.GradientTape() as tape:
            output = self.model(x, **self.training)
            loss, values = self.measured(y, output, self.model.losses, weights)
            shared = loss * tf.cast(share, loss.dtype)
        gradients = tape.gradient(shared, leaves)
        return values, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    @staticmethod
    def stepper(optimizer: Any, variables: list[Any]) -> Step:
        import tensorflow as tf

        apply = tf.function(lambda gradients: optimizer.apply(gradients, variables))

        def step(gradients: list[np.ndarray]) -> None:
            apply([tf.constant(array) for array in gradients])  # copies, because TensorFlow may keep them

        return step


COMPUTING: dict[str, type[Computing]] = {
    "jax": JaxComputing,
    "torch": TorchComputing,
    "tensorflow": TensorflowComputing,
}
"""By the names of Keras' backends that compute gradients."""


def array_of(variable: Any) -> np.ndarray:
    """Return the value of a Keras variable; may be a view, and read-only."""
    return keras.ops.convert_to_numpy(variable)


def assign(variable: Any, array: np.ndarray) -> None:
    """Set a Keras variable to a copy of an array, in the variable's shape."""
    variable.assign(np.array(array).reshape(variable.shape))


def stepper(optimizer: Any, variables: list[Any]) -> Step:
    """As Computing.stepper, for the current Keras backend."""
    return COMPUTING[keras.backend.backend()].stepper(optimizer, variables)
