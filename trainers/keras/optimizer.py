"""MirroredOptimizer: `model.compile(optimizer=...)` for many ranks."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from allreduce.backend import AllReduce
from allreduce.errors import OptionError
from allreduce.process import malloc
from allreduce.topology import Topology
from allreduce.transport.control import everywhere
from trainers.backends import backend_for
from trainers.checks import LEAST_LENGTH, SameData

Average = Callable[[Sequence[Any]], list[Any]]
_SCALED = (
    "compile() has put a LossScaleOptimizer around a MirroredOptimizer (mixed_float16 asks for one): a rank whose "
    "gradients overflow would skip a step that the other ranks take. Put it inside: "
    "MirroredOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
)


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


class Mirrored:
    """Mixin that MirroredOptimizer adds to an optimizer's class."""

    built: bool  # this and the next three are Keras' attributes
    variables: list[Any]
    learning_rate: Any
    loss_scale_factor: float | None

    backend: AllReduce
    _average: Average
    _owns_backend: bool
    _applying = False  # inside of a call whose gradients are averaged

    def mirror(self, backend: AllReduce, owns_backend: bool) -> None:
        """Set the backend that averages gradients. If the optimizer is built: collective, copies rank 0's variables."""
        self.backend, self._owns_backend = backend, owns_backend
        self._average = MAKERS[keras.backend.backend()](backend)
        if self.built:
            mirror_variables(self.variables, backend)

    @property
    def topology(self) -> Topology:
        """The ranks: `optimizer.topology.rank`, `.size`."""
        return self.backend.topology

    def build(self, variables: Sequence[Any]) -> None:
        mirror_variables(variables, self.backend)
        super().build(variables)  # type: ignore[misc] # which may copy them

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        with self._averaged(grads) as averages:
            return super().apply(averages, trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        with self._averaged(grads) as averages:
            return super().stateless_apply(optimizer_variables, averages, trainable_variables)  # type: ignore[misc]

    @contextmanager
    def _averaged(self, gradients: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Context manager: its value is the averages of gradients over all ranks, or, inside of another block of it,
        the gradients themselves, which are averaged already. Collective."""
        before = self._applying
        averages = gradients if before or not len(gradients) else self._average(gradients)
        self._applying = True
        try:
            yield averages
        finally:
            self._applying = before

    def close(self) -> None:
        """Free the backend, if this optimizer has made it. No step may follow. Collective."""
        wait_for_compiled()
        if self._owns_backend:
            self.backend.close()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None and self.loss_scale_factor is None:
            raise OptionError(_SCALED)
        super().__setattr__(name, value)


def MirroredOptimizer(  # noqa: N802 - a class to its users, as for PyTorch
    optimizer: Any, allreduce: str | AllReduce = "auto", *, topology: Topology | None = None
) -> Any:
    """Make a Keras optimizer average the gradients over all ranks before every update. Collective.

        model.compile(optimizer=MirroredOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")

    optimizer: a keras.optimizers.Optimizer or the name of one. It is changed and returned. Its class becomes a subclass
        of the same name, so that a saved model contains the plain optimizer.
    allreduce: the name of a backend, or a backend, which the caller closes.
    topology: the ranks; by default all ranks, or those of the given backend.

    It also has `backend`, `topology` and `close()`. When it is built, rank 0's trainable variables are copied to all
    ranks; StartFromFirstRank copies the other weights too.

    All ranks must apply the same number of gradients, of the same shapes in the same order, or all raise a
    DisagreementError. JAX and TensorFlow raise the errors of compiled code as their own, with the original error's name
    in the text.

    Raises on all ranks: OptionError (not a Keras optimizer, or a mirrored one; a Keras backend without gradients; an
    AllReduce backend that does not support sums), UnknownBackendError, UnavailableError.
    """
    if isinstance(allreduce, AllReduce):
        ranks, name, made = allreduce.topology, allreduce.name, False
    else:
        ranks, name, made = topology or Topology(), allreduce, topology is None
    plain, error = None, None
    try:
        plain = _plain(optimizer)
    except (OptionError, ValueError) as refused:  # Keras' ValueError: an unknown name
        error = OptionError(str(refused))
    built = ", built (it was loaded, say, or has trained)" if getattr(plain, "built", False) else ""
    text = f"MirroredOptimizer({type(plain).__name__}, {name!r}){built} with Keras' backend {keras.backend.backend()}"
    try:
        ranks.agree([zlib.crc32(text.encode())], text, error)
        backend = backend_for(allreduce, ranks, "replicated")
    except Exception as refused:
        if made and everywhere(refused, ranks.world):  # all ranks have this error, so `close` can be collective
            ranks.close()
        raise
    if made:
        backend.cleanup.append(lambda together: ranks.close() if together else None)
    assert plain is not None
    plain.__class__ = _derived(type(plain))
    plain.mirror(backend, owns_backend=not isinstance(allreduce, AllReduce))
    malloc.keep_freed_memory()
    return plain


def _plain(optimizer: Any) -> Any:
    """Return a Keras optimizer that can be mirrored, from an optimizer or its name. Raises OptionError."""
    if keras.backend.backend() not in MAKERS:
        raise OptionError(
            f"Keras' backend {keras.backend.backend()!r} computes no gradients; set KERAS_BACKEND to one of "
            f"{', '.join(MAKERS)} before Keras is imported"
        )
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, Mirrored):
        raise OptionError("this optimizer is a MirroredOptimizer already: use it as it is, or pass the plain one")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise OptionError(
            f"MirroredOptimizer takes a Keras optimizer (for example keras.optimizers.Adam(1e-3)) or its name, not "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return optimizer


def _derived(plain: type) -> type:
    """Return a subclass of Mirrored and `plain`. Keras saves it under the name of `plain`, and loads it as `plain`."""

    def from_config(cls: type, config: dict[str, Any], custom_objects: Any = None) -> Any:
        return plain.from_config(config, custom_objects)  # type: ignore[attr-defined]

    names = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "from_config": classmethod(from_config),
    }
    return type(plain.__name__, (Mirrored, plain), names)


def mirrored(model: Any) -> Mirrored:
    """Return the MirroredOptimizer that a model was compiled with. Raises OptionError."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, Mirrored):
        raise OptionError(
            f"this callback needs model.compile(optimizer=MirroredOptimizer(...)), and the model's optimizer is "
            f"{type(optimizer).__name__}"
        )
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        raise OptionError("TensorFlow's XLA can't compile calls of MPI: use model.compile(..., jit_compile=False)")
    return optimizer
