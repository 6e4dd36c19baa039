"""KerasReplica: any Keras model as a replica, with the Keras backends JAX, PyTorch and TensorFlow."""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"KerasReplica needs Keras 3 and one of its backends, which can't be imported ({error}): "
        'pip install ".[keras,jax]" or ".[keras,torch]" in the checkout, and KERAS_BACKEND=jax or KERAS_BACKEND=torch'
    ) from error

from trainers.replicas.keras.replica import KerasReplica

__all__ = ["KerasReplica"]
