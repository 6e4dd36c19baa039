"""A plain single-process Keras program, and the lines that make it data-parallel (marked +).

python scripts/keras_digits.py                                    # one process, batches of 64
mpirun -n 4 python scripts/keras_digits.py                        # four, 16 rows of each batch on every rank
KERAS_BACKEND=jax mpirun -n 4 python scripts/keras_digits.py      # or tensorflow; by default torch
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from trainers import datasets
from trainers.keras import AverageMetrics, MirroredOptimizer, SaveOnFirstRank, StartFromFirstRank, WarmUp, shard  # + 1

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
model = keras.Sequential(layers)
optimizer = MirroredOptimizer(keras.optimizers.AdamW(3e-3))  # + 2
rank, ranks = optimizer.topology.rank, optimizer.topology.size
model.compile(
    optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
x, y = shard((x_train, data.y_train), optimizer.topology)  # + 3
callbacks = [StartFromFirstRank(), AverageMetrics(), WarmUp(2, scale=1)]  # + 4; WarmUp(2): the rate times the ranks
if file := os.environ.get("KERAS_FILE"):
    callbacks.append(SaveOnFirstRank(keras.callbacks.ModelCheckpoint(file)))  # + 5
model.fit(x, y, batch_size=64 // ranks, epochs=8, callbacks=callbacks, verbose=2 if rank == 0 else 0)
loss, accuracy = model.evaluate(x_test, data.y_test, verbose=0)
if rank == 0:
    print(f"{keras.backend.backend()}, {ranks} ranks: loss {loss:.4f}, test accuracy {accuracy:.4f}")
optimizer.close()
