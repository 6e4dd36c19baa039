"""A job of test_keras.py: trainers.keras on some ranks, with Keras' backend from KERAS_BACKEND."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import allreduce
from allreduce import errors
from trainers.errors import ArgumentError
from trainers.keras import AverageMetrics, MirroredOptimizer, SaveOnFirstRank, StartFromFirstRank, WarmUp, shard

topology = allreduce.Topology()
rank, size = topology.rank, topology.size
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(203, 6)).astype("float32"), RANDOM.integers(0, 4, 203)
ROWS = 203 - 203 % size  # that shard keeps
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(4)]
    return keras.Sequential(layers)


def arrays(variables: Any) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def same_bits(variables: Any) -> None:
    bits = b"".join(array.tobytes() for array in arrays(variables))
    assert topology.world.bcast(bits) == bits


def raised(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Every rank raises `kind`."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no {kind} on rank {rank}")


def check_fit(folder: Path) -> None:
    """Ranks that begin with other weights train as one process does on all rows, and save what is loaded without us."""
    alone = model(0)
    alone.compile(keras.optimizers.Adam(0.02), LOSS, metrics=["accuracy"])
    wanted = alone.fit(X[:ROWS], Y[:ROWS], batch_size=24 * size, epochs=3, shuffle=False, verbose=0).history
    ours, file = model(rank), folder / "model.keras"
    optimizer = MirroredOptimizer(keras.optimizers.Adam(0.02), topology=topology)
    ours.compile(optimizer, LOSS, metrics=["accuracy"])
    x, y = shard((X, Y), topology)
    seen: list[float] = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    checkpoint = keras.callbacks.ModelCheckpoint(str(file))
    callbacks = [StartFromFirstRank(), AverageMetrics(), SaveOnFirstRank(watch), SaveOnFirstRank(checkpoint)]
    found = ours.fit(x, y, batch_size=24, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
    for here, there in zip(arrays(ours.weights), arrays(alone.weights), strict=True):
        np.testing.assert_allclose(here, there, rtol=2e-3, atol=2e-5)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3)
        assert topology.world.bcast(found[name]) == found[name]
    same_bits([*ours.weights, *optimizer.variables])
    assert seen == (found["loss"] if rank == 0 else [])
    if rank == 0:
        loaded = keras.models.load_model(file)
        assert not hasattr(loaded.optimizer, "backend")
        for here, there in zip(arrays(loaded.optimizer.variables), arrays(optimizer.variables), strict=True):
            np.testing.assert_array_equal(here, there)
    optimizer.close()
    raised((Exception,), lambda: ours.fit(x[:24], y[:24], verbose=0))


def check_data() -> None:
    """As many rows on each rank, from trees of arrays; what can't be divided is told."""
    x, (y, more) = shard((X, [Y, {"a": X[:, :1]}]), topology)
    for whole, part in ((X, x), (Y, y), (X[:, :1], more["a"])):
        np.testing.assert_array_equal(part, whole[rank:ROWS:size])
    for bad, words in (
        ((X, Y[:9]), "the arrays differ in rows: 9, 203"),
        (X[: size - 1], f"{size - 1} rows can't be divided among {size} ranks"),
        (iter([]), "DistributedSampler"),
        (np.float32(1), "DistributedSampler"),
    ):
        assert words in raised(ArgumentError, lambda bad=bad: shard(bad, topology))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        part = shard(tf.data.Dataset.range(2 * size + 1), topology)
        assert [int(element) for element in part] == [rank, rank + size]
        endless = shard(tf.data.Dataset.range(size).repeat(), topology)
        assert int(next(iter(endless))) == rank
        odd = tf.data.Dataset.range(9).filter(lambda number: number % 2 == 1)
        assert "assert_cardinality" in raised(ArgumentError, lambda: shard(odd, topology))


def check_warm_up() -> None:
    """In steps, and then the rate is anybody's."""
    ours = model(0)
    optimizer = MirroredOptimizer(keras.optimizers.SGD(0.25, momentum=0.5), "native", topology=topology)
    ours.compile(optimizer, LOSS)
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            rates.append(float(optimizer.learning_rate))

    warm_up = WarmUp(2, scale=3.0)
    for epochs in (3, 1):
        ours.fit(X[:40], Y[:40], batch_size=20, epochs=epochs, verbose=0, callbacks=[warm_up, Rates()])
    np.testing.assert_allclose(np.array(rates) / 0.25, [1.5, 2, 2.5, 3, 3, 3, 3, 3])
    schedule = MirroredOptimizer(
        keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), "native", topology=topology
    )
    ours.compile(schedule, LOSS)
    assert "schedule" in raised(ArgumentError, lambda: ours.fit(X[:20], Y[:20], verbose=0, callbacks=[WarmUp()]))
    for each in (optimizer, schedule):
        each.close()


def apply(optimizer: Any, gradient: Any, variable: Any) -> None:
    """As loops of one's own do, with Keras' backends."""
    if keras.backend.backend() != "jax":
        optimizer.apply([gradient], [variable])
        return
    state = [each.value for each in optimizer.variables]
    (changed,), state = optimizer.stateless_apply(state, [gradient], [variable.value])
    for each, value in zip([variable, *optimizer.variables], [changed, *state], strict=True):
        each.assign(value)


def check_scaled() -> None:
    """A gradient that is not finite on one rank makes all leave the step out; eagerly, by a loop of one's own."""
    variable = keras.Variable(np.ones(3, "float32") * (rank + 1))
    inner = keras.optimizers.SGD(0.5)
    optimizer = MirroredOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), topology=topology)
    optimizer.build([variable])
    for value in (1.0, np.inf if rank == 0 else 1.0, 2.0):
        apply(optimizer, keras.ops.full((3,), value * 4.0 * (rank + 1)), variable)
        inner.learning_rate = 1.0
    mean = (size + 1) / 2  # of rank + 1; after the step that was left out the scale is 2
    np.testing.assert_allclose(arrays([variable])[0], np.full(3, 1 - 0.5 * mean - 4 * mean))
    same_bits([variable])
    ours = model(0)
    ours.dtype_policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    plain = MirroredOptimizer("sgd", topology=topology)
    assert "Put it inside" in raised(errors.OptionError, lambda: ours.compile(plain, LOSS))
    ours.compile(optimizer, LOSS)
    for each in (optimizer, plain):
        each.close()


def check_errors() -> None:
    """Named, on every rank."""
    text = raised(errors.OptionError, lambda: MirroredOptimizer(object(), topology=topology))
    assert "takes an optimizer of Keras'" in text
    assert "Could not" in raised(errors.OptionError, lambda: MirroredOptimizer("adamant", topology=topology))
    raised(errors.UnknownBackendError, lambda: MirroredOptimizer("adam", "rign", topology=topology))
    kind = keras.optimizers.SGD if rank else keras.optimizers.Adam
    text = raised(errors.DisagreementError, lambda: MirroredOptimizer(kind(0.1), topology=topology))
    assert "MirroredOptimizer(Adam, 'auto')" in text
    with allreduce.create("auto", topology) as backend:
        optimizer = MirroredOptimizer("adam", backend)
        assert "already" in raised(errors.OptionError, lambda: MirroredOptimizer(optimizer, backend))
        optimizer.close()  # the backend is ours
        other = keras.Variable(np.ones(3 + rank, "float32"))
        raised(errors.DisagreementError, lambda: optimizer.build([other]))
        ours = keras.Sequential([keras.layers.Dense(2)])
        ours.compile(MirroredOptimizer("sgd", backend), "mse")
        start = StartFromFirstRank()
        start.set_model(ours)
        assert "is not built" in raised(ArgumentError, start.on_train_begin)
        ours.compile("sgd", "mse")
        assert "is SGD" in raised(errors.OptionError, start.on_train_begin)
        if keras.backend.backend() == "tensorflow":
            ours.compile(MirroredOptimizer("sgd", backend), "mse", jit_compile=True)
            assert "jit_compile=False" in raised(errors.OptionError, start.on_train_begin)
        optimizer = MirroredOptimizer("sgd", backend)
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer.build([variable])
        text = raised((Exception,), lambda: optimizer.apply([keras.ops.ones((3 + rank,))], [variable]))
        assert "float32[4]" in text, text
    raised(ArgumentError, lambda: SaveOnFirstRank("checkpoint"))
    raised(ArgumentError, lambda: WarmUp(-1))
    raised(ArgumentError, lambda: WarmUp(scale=0))


if "data" in sys.argv:
    check_data()
if "fit" in sys.argv:
    check_fit(Path(sys.argv[-1]))
if "rest" in sys.argv:
    check_warm_up()
    check_scaled()
    check_errors()
topology.close()
print(f"rank {rank} is done")
