"""A Keras program with model.fit, on one process.

python keras_digits.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
model = keras.Sequential(layers)
optimizer = keras.optimizers.AdamW(3e-3)
model.compile(
    optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
callbacks = []
if file := os.environ.get("KERAS_FILE"):
    callbacks.append(keras.callbacks.ModelCheckpoint(file))
model.fit(x_train, data.y_train, batch_size=64, epochs=8, callbacks=callbacks, verbose=2)
loss, accuracy = model.evaluate(x_test, data.y_test, verbose=0)
print(f"{keras.backend.backend()}: loss {loss:.4f}, test accuracy {accuracy:.4f}")
