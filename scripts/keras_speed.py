"""Keras on two ranks against TensorFlow's MultiWorkerMirroredStrategy: the same model, batches and initial weights.

    python scripts/keras_speed.py                                        # TensorFlow's, with RING; two processes
    KERAS_BACKEND=tensorflow mpirun -n 2 python scripts/keras_speed.py   # ours, with any of Keras' backends

Prints the median time of a step over all epochs but the first, and the accuracy. Run both alternately: other work on
the machine changes the times.
"""

import json
import os
import socket
import subprocess
import sys
import time

UNITS = [int(units) for units in os.environ.get("KERAS_SPEED_UNITS", "1024,1024,512").split(",")]
EPOCHS, STEPS, BATCH, RANKS = 6, 30, 128, 2
OURS = "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def start_workers() -> int:
    """Run this program in two processes with TF_CONFIG; returns the exit code."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
    workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    started = []
    for index in range(RANKS):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        started.append(subprocess.Popen([sys.executable, __file__], env={**os.environ, "TF_CONFIG": config}))
    return max(each.wait() for each in started)


if not OURS and "TF_CONFIG" not in os.environ:
    sys.exit(start_workers())

import keras  # noqa: E402
import numpy as np  # noqa: E402

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)


def data():
    """Return rows of ten overlapping classes, and their labels."""
    random = np.random.default_rng(0)
    middles = random.normal(size=(10, 784)).astype("float32") / 8
    y = random.integers(0, 10, BATCH * STEPS)
    return middles[y] + random.normal(size=(len(y), 784)).astype("float32"), y


def model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for units in UNITS]
    made = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


class Clock(keras.callbacks.Callback):
    """The seconds of each epoch."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)


clock, (x, y) = Clock(), data()
if OURS:
    from trainers.keras import AverageMetrics, MirroredOptimizer, StartFromFirstRank, shard

    optimizer = MirroredOptimizer(keras.optimizers.Adam(1e-4))
    network, first, name = model(optimizer), optimizer.topology.rank == 0, f"ours, {keras.backend.backend()}"
    callbacks = [clock, StartFromFirstRank(), AverageMetrics()]
    x, y = shard((x, y), optimizer.topology)
    history = network.fit(x, y, batch_size=BATCH // RANKS, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    loss, accuracy = (history.history[key][-1] for key in ("loss", "accuracy"))
    optimizer.close()
else:
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    with strategy.scope():
        network = model(keras.optimizers.Adam(1e-4))
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    first, name = worker == 0, "MultiWorkerMirroredStrategy (RING)"
    own = [
        [tf.constant(part) for part in rows[worker::RANKS].reshape(STEPS, BATCH // RANKS, *rows.shape[1:])]
        for rows in (x, y)
    ]

    def step(x, y):
        with tf.GradientTape() as tape:
            output = network(x, training=True)
            part = network.loss(y, output)  # divided by the number of workers, under this strategy
        # apply_gradients sums over the workers.
        slopes = tape.gradient(part, network.trainable_variables)
        network.optimizer.apply_gradients(zip(slopes, network.trainable_variables, strict=True))
        return part, tf.reduce_mean(tf.cast(tf.argmax(output, 1) == y, tf.float32)) / RANKS

    @tf.function
    def distributed(x, y):
        values = strategy.run(step, args=(x, y))
        return [strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in values]

    clock.on_train_begin()
    for epoch in range(EPOCHS):  # not model.fit: Keras 3 does not support this strategy
        clock.on_epoch_begin(epoch)
        values = [distributed(*batch) for batch in zip(*own, strict=True)]
        loss, accuracy = (np.mean([float(value[number]) for value in values]) for number in (0, 1))
        clock.on_epoch_end(epoch)
if first:
    step = 1000 * float(np.median(clock.seconds[1:])) / STEPS
    print(
        f"{name}: {network.count_params():,} parameters, {step:.1f} ms a step, loss {loss:.4f}, accuracy {accuracy:.4f}"
    )
