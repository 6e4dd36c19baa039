"""A Keras program with model.fit, on one process.

python keras_fit.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

from trainers import datasets

data = datasets.load("digits")
x_train, x_test = ((x - data.shift) * data.scale for x in (data.x_train, data.x_test))
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
)
optimizer = keras.optimizers.AdamW(3e-3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
model.fit(
    x_train,
    data.y_train,
    batch_size=64,
    epochs=8,
    verbose=2,
    callbacks=[
        keras.callbacks.ModelCheckpoint("model.keras"),
    ],
)
scores = model.evaluate(x_test, data.y_test, verbose=0, return_dict=True)
print(f"test accuracy {scores['accuracy']:.3f}")
