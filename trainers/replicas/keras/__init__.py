"""KerasReplica: any Keras model as a replica, with the Keras backends JAX, PyTorch and TensorFlow."""

from trainers.errors import needing

with needing(
    "KerasReplica needs Keras 3 and one of its backends, which can't be imported ({}): "
    'pip install ".[keras,jax]" or ".[keras,torch]" in the checkout, and KERAS_BACKEND=jax or KERAS_BACKEND=torch',
    ImportError,
):
    import keras  # noqa: F401

from trainers.replicas.keras.replica import KerasReplica

__all__ = ["KerasReplica"]
