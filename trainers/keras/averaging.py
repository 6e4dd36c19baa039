"""Averages gradients of Keras over the ranks, for each of Keras' backends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from allreduce.backend import AllReduce
from trainers.checks import LEAST_LENGTH, SameData

Average = Callable[[Sequence[Any]], list[Any]]


class Averaging:
    """Callable: averages a list of gradients (tensors of Keras' backend, or None) over all ranks. Collective.

    In the block of `with averaging.disabled():` a call returns its gradients, which are averaged already, unchanged.
    """

    def __init__(self, backend: AllReduce) -> None:
        self._average, self._disabled = MAKERS[keras.backend.backend()](backend), False

    def __call__(self, gradients: Sequence[Any]) -> Sequence[Any]:
        return gradients if self._disabled else self._average(gradients)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before


def wait_for_compiled() -> None:
    """Wait for compiled code that still runs, because its collective calls must come before the next ones. Local."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def mirror_variables(variables: Sequence[Any], backend: AllReduce) -> None:
    """Overwrite Keras' variables with those of rank 0. Collective."""
    wait_for_compiled()
    eager: Any = nullcontext()
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        eager = tensorflow.init_scope()
    with eager:  # variables have values in the block, even while TensorFlow traces the function around it
        arrays = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        backend.broadcast(arrays, root=0)
        if backend.rank:
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)


def _of_jax(backend: AllReduce) -> Average:
    """Return an average that works inside of functions that JAX compiles."""
    from allreduce.jax import pmean

    return lambda gradients: pmean(list(gradients), backend)


def _on_host(backend: AllReduce) -> Callable[[list[Any]], list[Any]]:
    """Return a function that averages arrays, some of which may be None; it warns if all ranks have the same data."""
    same_data = SameData(backend)

    def averaged(arrays: list[Any]) -> list[Any]:
        first = next((each for each in arrays if each is not None and each.size >= LEAST_LENGTH), None)
        if first is not None:
            same_data.compare(first.reshape(-1))
        averages: list[Any] = backend.reduced(arrays, "mean")
        return averages

    return averaged


def _of_torch(backend: AllReduce) -> Average:
    """Return an average whose results are views of the backend's memory, valid until the next step."""
    import torch

    from trainers.replicas.pytorch.tensors import as_array, as_tensor

    average_arrays = _on_host(backend)

    @torch.compiler.disable
    def average(gradients: Sequence[Any]) -> list[Any]:
        arrays = [None if each is None else as_array(each) for each in gradients]
        averages = average_arrays(arrays)
        return [
            None if each is None else as_tensor(array, each.dtype).to(each.device)
            for each, array in zip(gradients, averages, strict=True)
        ]

    return average


def _of_tensorflow(backend: AllReduce) -> Average:
    """Return an average that works inside of a tf.function without XLA. Sparse gradients become dense ones."""
    import tensorflow as tf

    average_arrays = _on_host(backend)

    @tf.autograph.experimental.do_not_convert
    def average(gradients: Sequence[Any]) -> list[Any]:
        numbers = [number for number, each in enumerate(gradients) if each is not None]
        dense = [tf.convert_to_tensor(gradients[number]) for number in numbers]

        def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
            tree: list[Any] = [None] * len(gradients)
            for number, array in zip(numbers, arrays, strict=True):
                tree[number] = array
            averages = average_arrays(tree)
            return [averages[number].copy() for number in numbers]  # TensorFlow keeps a reference to the array

        found: list[Any] = [None] * len(gradients)
        averages = tf.nest.flatten(tf.numpy_function(on_host, dense, [each.dtype for each in dense]))
        for number, plain, averaged in zip(numbers, dense, averages, strict=True):
            averaged.set_shape(plain.shape)
            found[number] = averaged
        return found

    return average


MAKERS: dict[str, Callable[[AllReduce], Average]] = {"jax": _of_jax, "torch": _of_torch, "tensorflow": _of_tensorflow}
"""By the names of Keras' backends that compute gradients."""
