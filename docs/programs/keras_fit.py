"""A Keras program with model.fit, on many ranks.

mpirun -n 4 python keras_fit.py
KERAS_BACKEND=jax mpirun -n 4 python keras_fit.py    # or tensorflow
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

from trainers import datasets
from trainers.keras import AverageMetrics, MirroredOptimizer, StartFromFirstRank, shard

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)
optimizer = MirroredOptimizer(keras.optimizers.AdamW(3e-3))
ranks = optimizer.topology
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
x, y = shard((x_train, data.y_train), ranks)
callbacks = [StartFromFirstRank(), AverageMetrics()]
if ranks.rank == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))
model.fit(
    x,
    y,
    batch_size=64 // ranks.size,
    epochs=8,
    verbose=2 if ranks.rank == 0 else 0,
    callbacks=callbacks,
)
scores = model.evaluate(x_test, data.y_test, verbose=0, return_dict=True)
if ranks.rank == 0:
    print(f"test accuracy {scores['accuracy']:.3f}")
optimizer.close()
