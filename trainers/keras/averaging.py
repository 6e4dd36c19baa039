"""How the gradients of Keras' backends get to the other ranks and back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from allreduce.backend import AllReduce

Average = Callable[[Sequence[Any]], list[Any]]


class Averaging:
    """The mean over all ranks of a list of tensors of Keras' backend; None stays None. Collective.

    Inside of `with averaging.done():` it gives back what it is given.
    """

    def __init__(self, backend: AllReduce) -> None:
        self._average, self._done = MAKERS[keras.backend.backend()](backend), False

    def __call__(self, gradients: Sequence[Any]) -> Sequence[Any]:
        return gradients if self._done else self._average(gradients)

    @contextmanager
    def done(self) -> Iterator[None]:
        before, self._done = self._done, True
        try:
            yield
        finally:
            self._done = before


def settle() -> None:
    """Wait until what was compiled has come to its end: only then the backend's own calls may follow. Local."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def outside() -> Any:
    """Inside of `with` variables have values, also where a function is being compiled around it."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        return tensorflow.init_scope()
    return nullcontext()


def mirror_variables(variables: Sequence[Any], backend: AllReduce) -> None:
    """Overwrite Keras' variables with those of rank 0. Collective."""
    settle()
    with outside():
        arrays = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        backend.broadcast(arrays, root=0)
        if backend.rank:
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)


def _of_jax(backend: AllReduce) -> Average:
    """Inside of what JAX compiles, too."""
    from allreduce.jax import pmean

    return lambda gradients: pmean(list(gradients), backend)


def _of_torch(backend: AllReduce) -> Average:
    """What comes back are views of the backend's memory, good until the next step."""
    import torch

    from trainers.replicas.pytorch.tensors import as_array, as_tensor

    @torch.compiler.disable
    def average(gradients: Sequence[Any]) -> list[Any]:
        arrays = [None if each is None else as_array(each) for each in gradients]
        averages = backend.reduced(arrays, "mean")
        return [
            None if each is None else as_tensor(array, each.dtype).to(each.device)
            for each, array in zip(gradients, averages, strict=True)
        ]

    return average


def _of_tensorflow(backend: AllReduce) -> Average:
    """Inside of a tf.function, too, but not of what XLA compiles. Sparse gradients become dense ones."""
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def average(gradients: Sequence[Any]) -> list[Any]:
        numbers = [number for number, each in enumerate(gradients) if each is not None]
        dense = [tf.convert_to_tensor(gradients[number]) for number in numbers]

        def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
            tree: list[Any] = [None] * len(gradients)
            for number, array in zip(numbers, arrays, strict=True):
                tree[number] = array
            averages = backend.reduced(tree, "mean")
            return [averages[number].copy() for number in numbers]  # TensorFlow keeps the memory of what it is given

        found: list[Any] = [None] * len(gradients)
        averages = tf.nest.flatten(tf.numpy_function(on_host, dense, [each.dtype for each in dense]))
        for number, plain, averaged in zip(numbers, dense, averages, strict=True):
            averaged.set_shape(plain.shape)
            found[number] = averaged
        return found

    return average


MAKERS: dict[str, Callable[[AllReduce], Average]] = {"jax": _of_jax, "torch": _of_torch, "tensorflow": _of_tensorflow}
"""By the names of Keras' backends that compute gradients."""
