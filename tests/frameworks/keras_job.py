"""A job of test_keras.py: trainers.keras on some ranks, with Keras' backend from KERAS_BACKEND; check_scaled and
check_errors not with JAX, whose optimizers change no variables in a loop."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

import allreduce
from allreduce import errors
from tests.frameworks.replica_checks import (
    as_dict,
    as_tuple,
    check_edits,
    check_slices,
    check_weights,
)
from trainers import (
    EMA,
    Accumulate,
    ClipNorm,
    MirroredTrainer,
    ParameterServerTrainer,
    Schedule,
    SpareReplicasTrainer,
)
from trainers.errors import ArgumentError, ModelFileError
from trainers.keras import AverageMetrics, MirroredOptimizer, StartFromFirstRank, shard
from trainers.replica import attach, copy_of
from trainers.replicas.keras import KerasReplica

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
    """Ranks that begin with different weights train like one process on all rows, and save a model that loads without
    this package."""
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
    callbacks = [StartFromFirstRank(), AverageMetrics(), *([watch, checkpoint] if rank == 0 else [])]
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
    """Every rank gets the same number of rows, from trees of arrays; data that can't be divided raises an error."""
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


def check_scaled() -> None:
    """If a gradient is not finite on one rank, all ranks leave out the step; eagerly, in a custom loop."""
    variable = keras.Variable(np.ones(3, "float32") * (rank + 1))
    inner = keras.optimizers.SGD(0.5)
    optimizer = MirroredOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), topology=topology)
    optimizer.build([variable])
    for value in (1.0, np.inf if rank == 0 else 1.0, 2.0):
        optimizer.apply([keras.ops.full((3,), value * 4.0 * (rank + 1))], [variable])
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


def check_without_callbacks() -> None:
    """The weights of rank 0 are copied, also the state of a used optimizer; metrics may be arrays."""
    ours, alone, targets = model(rank), model(0), np.eye(4, dtype="float32")[Y]
    optimizer = MirroredOptimizer(keras.optimizers.ScheduleFreeAdamW(0.02), topology=topology)
    x, y = shard((X, targets), topology)
    for each, own in ((ours, optimizer), (alone, keras.optimizers.ScheduleFreeAdamW(0.02))):
        each.compile(own, "mse", metrics=[keras.metrics.F1Score(name="f1")])
    alone.fit(X[:ROWS], targets[:ROWS], batch_size=24 * size, shuffle=False, verbose=0)
    ours.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    for here, there in zip(arrays(ours.weights), arrays(alone.weights), strict=True):
        np.testing.assert_allclose(here, there, rtol=2e-3, atol=2e-5)
    same_bits([*ours.weights, *optimizer.variables])
    found = ours.fit(x, y, verbose=0, callbacks=[AverageMetrics()]).history["f1"][0]
    assert found.shape == (4,)
    assert (topology.world.bcast(found) == found).all()
    built = keras.optimizers.SGD(0.1)
    if rank == 0:
        built.build(ours.trainable_variables)
    text = raised(errors.DisagreementError, lambda: MirroredOptimizer(built, topology=topology))
    assert "MirroredOptimizer(SGD, 'auto'), built" in text, text
    optimizer.close()


class Halved(keras.Model):
    """A model whose layer creates its weights in the first call, of which Keras warns."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x) / 2


def check_errors() -> None:
    """Named errors on every rank."""
    kind = keras.optimizers.SGD if rank else keras.optimizers.Adam
    for error, words, given in (
        (errors.OptionError, "takes a Keras optimizer", (object(),)),
        (errors.OptionError, "Could not", ("adamant",)),
        (errors.UnknownBackendError, "rign", ("adam", "rign")),
        (errors.OptionError, "does not sum", ("adam", "adasum")),
        (errors.DisagreementError, "MirroredOptimizer(Adam, 'auto')", (kind(0.1),)),
    ):
        assert words in raised(error, lambda given=given: MirroredOptimizer(*given, topology=topology))
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
        empty = Halved()
        empty.build((None, 6))  # which makes nothing
        empty.compile(MirroredOptimizer("sgd", backend), "mse")
        start.set_model(empty)
        assert "is not built" in raised(ArgumentError, start.on_train_begin)
        start.set_model(ours)
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


ACCURACY = {"accuracy": keras.metrics.sparse_categorical_accuracy}


def replica(seed: int, optimizer: Any = None, norm: bool = False, **options: Any) -> KerasReplica:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(7, activation="tanh", **options), keras.layers.Dense(4)]
    if norm:
        layers[1:1] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    return KerasReplica(
        keras.Sequential([keras.Input((6,)), *layers]), LOSS, optimizer or keras.optimizers.Adam(0.02), ACCURACY
    )


def halve(replica: KerasReplica) -> None:
    replica.model.set_weights([each / 2 if each.dtype.kind == "f" else each for each in replica.model.get_weights()])


def check_trainers() -> None:
    """Trainings that differ from one rank's (batch norm, asynchronous servers, spare replicas); a refused optimizer.
    The matrix has the others."""
    steps = [Accumulate(2), ClipNorm(1.0), EMA(0.9), Schedule("linear")]
    for make in (
        partial(MirroredTrainer, replica(rank, norm=True), "ring", topology, update="sharded"),
        partial(ParameterServerTrainer, replica(rank), topology, servers=1),
        partial(SpareReplicasTrainer, replica(rank, norm=True), topology, spare=1),
    ):
        with make() as trainer:
            epochs = trainer.fit(X[:50], Y[:50], epochs=10, batch_size=16, progress=False, transforms=steps)
            assert min(epoch.loss for epoch in epochs[1:]) < epochs[0].loss  # which gradients are used is by chance
            state = b"".join(
                each.tobytes() for name, each in sorted(trainer.replica.state().items()) if "model" in name
            )
            assert isinstance(trainer, SpareReplicasTrainer) or topology.world.bcast(state) == state
        model = trainer.replica.model
        model.set_weights([each * 0 for each in model.get_weights()])
        with MirroredTrainer(trainer.replica, "native", topology) as trainer:  # trains the weights that the user set
            trainer.evaluate(X[:4], Y[:4])
            assert not trainer.replica.state()["parameters"].any()
            assert not flat(model.trainable_variables).any()
    clipped = keras.optimizers.Adam(0.02, global_clipnorm=1.0)
    text = raised(ArgumentError, lambda: MirroredTrainer(replica(0, clipped), "shared", topology, update="sharded"))
    assert 'need whole arrays. Use update="replicated"' in text


def check_parts() -> None:
    """Two replicas in one memory, each of which updates its own slice, end with the parameters and the state of one
    replica."""
    kinds: list[Callable[[], Any]] = [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Nadam(0.02, weight_decay=0.1, gradient_accumulation_steps=2),
    ]
    for kind in kinds:
        whole, first, second = (replica(0, kind()) for _ in range(3))
        for each in (whole, first, second):  # begun in one piece
            each.gradients(X, Y, 1.0)
            each.update()
        check_slices(whole, first, second, X, Y)


def check_replica(folder: Path) -> None:
    """Gradients are weighted; batches can be undone; files, copies, rates, and refused arguments."""
    ours, other = replica(0, norm=True), replica(1, norm=True)
    buffer = np.full(ours.gradient_length, np.nan, "float32")
    ours.bind(None, buffer)
    ours.undoable = True
    before, random = ours.state(), ours.local_state()
    values = ours.gradients(X, Y, 0.25)
    assert any((ours.state()[name] != array).any() for name, array in before.items())
    ours.undo()
    assert all((ours.state()[name] == array).all() for name, array in before.items())
    quarter = buffer.copy()
    ours.load_local_state(random)
    ours.gradients(X, Y, 1.0)
    np.testing.assert_allclose(4 * quarter, buffer, rtol=1e-4, atol=1e-6)
    assert np.isfinite(values).all()
    ours.update()
    path = str(folder / f"replica{rank}.npz")
    ours.save(path)
    other.restore(path)
    for each in (other, copy_of(ours)):
        for name, array in ours.state().items():
            np.testing.assert_array_equal(array, each.state()[name])
    np.testing.assert_allclose(ours.evaluate(X, Y) / len(X), copy_of(ours).evaluate(X, Y) / len(X), rtol=1e-5)
    assert ours.gradients(X[:0], Y[:0], 0.0) == [0.0, 0.0]
    assert not buffer.any()
    assert ours.predict(X[:0]).shape == (0, 4)
    attach(ours, *np.zeros((2, ours.gradient_length), "float32"))
    attach(ours, None, buffer)  # as after a sharded fit
    ours.gradients(X, Y, 1.0)
    buffer[ours.parameter_count :] *= 2  # as other ranks change the averages
    ours.update()
    norm = ours.model.layers[1]
    np.testing.assert_array_equal(flat([norm.moving_mean, norm.moving_variance]), buffer[ours.parameter_count :])
    parameters = ours.state()["parameters"]  # brings the model up to date, as `put` does
    np.testing.assert_array_equal(flat(ours.model.trainable_variables), parameters)
    ours.put((slice(0, ours.parameter_count),), parameters / 2)
    np.testing.assert_array_equal(flat(ours.model.trainable_variables), parameters / 2)
    ours.put((slice(0, ours.parameter_count),), parameters)
    ours.learning_rates = [0.5]
    assert ours.learning_rates == [0.5]
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    assert replica(0, schedule).learning_rates == []
    constant = replica(0, kernel_regularizer=keras.regularizers.L2(1.0))
    assert constant.evaluate(X, Y)[0] > 1.5 * replica(0).evaluate(X, Y)[0]
    keras.config.set_dtype_policy("mixed_bfloat16")
    mixed = replica(0)
    keras.config.set_dtype_policy("float32")
    mixed.check(X, Y)
    np.testing.assert_allclose(mixed.predict(X).astype("float32"), replica(0).predict(X), rtol=0.1, atol=0.03)
    np.testing.assert_allclose(mixed.gradients(X, Y, 1.0)[0], replica(0).gradients(X, Y, 1.0)[0], rtol=0.1)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("takes a Keras optimizer", lambda: replica(0, object())),
        ("does not scale losses", lambda: replica(0, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))),
        ("was built for another model", lambda: replica(0, ours.optimizer_state.whole.optimizer)),
        ("use_ema", lambda: replica(0, keras.optimizers.SGD(0.1, use_ema=True))),
        ("is not built", lambda: KerasReplica(keras.Sequential([keras.layers.Dense(2)]), "mse", "sgd")),
        ("takes a keras.Model", lambda: KerasReplica(object(), "mse", "sgd")),
        ('reduction="sum"', lambda: KerasReplica(ours.model, keras.losses.MeanSquaredError(reduction="sum"), "sgd")),
        (r"can't be fed with x float32 of shape (203, 5)", lambda: ours.check(X[:, :5], Y)),
        ("buffer must be 1-D, float32", lambda: ours.bind(None, np.zeros(3, "float32"))),
    ]
    for words, call in refused:
        assert words in raised(ArgumentError, call)
    for another in (replica(0), replica(0, keras.optimizers.SGD(0.1), norm=True)):
        assert "another one" in raised(ModelFileError, lambda another=another: ours.load_state(another.state()))


def check_several_inputs() -> None:
    """Functional models of tuples, lists and dicts of inputs; weights, with a loss and a function."""

    def two(shape: Any, loss: Any = LOSS, kind: type = tuple) -> KerasReplica:
        keras.utils.set_random_seed(0)
        first, rest = keras.Input((2,), name="first"), keras.Input((4,), name="rest")
        output = keras.layers.add([keras.layers.Dense(3)(first), keras.layers.Dense(3, "tanh")(rest)])
        inputs = {"first": first, "rest": rest} if shape is as_dict else kind([first, rest])
        return KerasReplica(keras.Model(inputs, output, name="two"), loss, keras.optimizers.Adam(0.02))

    def of_rows(y: Any, output: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, output, from_logits=True)

    for shape in (as_dict, as_tuple):
        check_weights(two(shape), shape)
    check_weights(two(as_tuple, of_rows, list), as_tuple)
    x, y, weights = as_tuple(X), Y % 3, np.ones(len(X))
    divides = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    for loss, words in (
        (divides, "divides by the sum"),
        (lambda y, output: of_rows(y, output)[0], "returns one number"),
    ):
        assert words in raised(ArgumentError, lambda loss=loss: two(as_tuple, loss).check(x, y, weights))


def check_weighed(every: bool) -> None:
    """Targets that the loss ignores, all of a rank's share of the second batch, and a layer that is not used: as Keras
    trains. A layer that was frozen since is refused."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    y = Y.copy()
    y[::4] = y[120:] = -1
    y[121] = y[201] = 2  # a batch without any would lack the regularizer

    def weighed() -> Any:
        keras.utils.set_random_seed(3)
        first = keras.layers.Dense(7, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        made = keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(4)])
        if every:  # with PyTorch, whose gradient of a layer that is not used is None
            made.spare = keras.layers.Dense(3, kernel_initializer="ones")
            made.spare.build((None, 3))
        return made

    def adam() -> Any:
        return keras.optimizers.AdamW(0.02, weight_decay=0.1)

    plain = weighed()
    plain.compile(adam(), loss)
    for start in (0, 100, 200):
        plain.train_on_batch(X[start : start + 100], y[start : start + 100])
    expected = float(plain.evaluate(X, y, batch_size=len(X), verbose=0))
    for update, accumulate in (("replicated", 1), ("sharded", 1), ("replicated", 3))[: 3 if every else 2]:
        ours = weighed()
        with MirroredTrainer(KerasReplica(ours, loss, adam()), "ring", topology, update=update) as trainer:
            trainer.fit(X, y, 1, 100, shuffle=False, progress=False, transforms=[Accumulate(accumulate)])
            assert abs(trainer.evaluate(X, y)["loss"] - expected) < 1e-4
            parameters = trainer.replica.state()["parameters"].copy()
            np.testing.assert_allclose(parameters, flat(plain.weights), atol=2e-5)
            ours.layers[0].trainable = False
            refit = partial(trainer.fit, X, y, 1, 100, progress=False)
            assert "were frozen or unfrozen" in raised(ArgumentError, refit)


def flat(variables: Any) -> np.ndarray:
    return np.concatenate([each.reshape(-1) for each in arrays(variables)])


def check_no_mean() -> None:
    """Losses of which ranks can't divide a batch are refused by name."""

    def rooted(y: Any, output: Any) -> Any:
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(output[:, 0] - keras.ops.cast(y, "float32"))))

    masks = keras.Sequential([keras.Input((6, 1)), keras.layers.Masking(), keras.layers.Dense(1)])
    for made, loss, x, y, words in (
        (model(0), rooted, X, Y, "the loss rooted is no mean over the rows"),
        (masks, keras.losses.MeanSquaredError(), X[..., None], X[..., None], "has a mask"),
    ):
        with MirroredTrainer(KerasReplica(made, loss, "sgd"), "ring", topology) as trainer:
            assert words in raised(ArgumentError, partial(trainer.fit, x, y, 1, progress=False)), words


if "data" in sys.argv:
    check_data()
if "fit" in sys.argv:
    check_fit(Path(sys.argv[-1]))
if "trainers" in sys.argv:
    check_trainers()
if "trainers" in sys.argv or "sharded" in sys.argv:
    check_weighed("trainers" in sys.argv)
    check_edits(partial(replica, 0, norm="trainers" in sys.argv), halve, topology, (X[:50], Y[:50]))
    check_no_mean()
if "replica" in sys.argv:
    check_parts()
    check_several_inputs()
    check_replica(Path(sys.argv[-1]))
if "rest" in sys.argv:
    check_scaled()
    check_without_callbacks()
    check_errors()
topology.close()
print(f"rank {rank} is done")
