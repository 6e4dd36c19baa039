"""Keras 3, with the backends JAX, PyTorch and TensorFlow: `model.fit` on many ranks.

from trainers.keras import AverageMetrics, MirroredOptimizer, StartFromFirstRank, shard

optimizer = MirroredOptimizer(keras.optimizers.Adam(1e-3))
model.compile(optimizer=optimizer, loss="mse")
x, y = shard((x, y), optimizer.topology)
model.fit(x, y, batch_size=64 // optimizer.topology.size, callbacks=[StartFromFirstRank(), AverageMetrics()])
"""

from trainers.errors import needing

with needing(
    "trainers.keras needs Keras 3 and one of its backends, which can't be imported ({}): "
    'pip install ".[keras,jax]" or ".[keras,torch]" in the checkout, and KERAS_BACKEND=jax or KERAS_BACKEND=torch',
    ImportError,
):
    import keras  # noqa: F401

from trainers.keras.callbacks import AverageMetrics, StartFromFirstRank
from trainers.keras.data import shard
from trainers.keras.optimizer import MirroredOptimizer

__all__ = ["AverageMetrics", "MirroredOptimizer", "StartFromFirstRank", "shard"]
