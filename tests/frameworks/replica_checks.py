"""Checks that every replica must pass, whatever its framework. For tests, and for the jobs that they start."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from allreduce import Topology
from tests.ranks.training.fits import STRATEGIES
from trainers import LocalSGD, MirroredTrainer
from trainers.arrays import average
from trainers.replica import Replica, attach, elements_of, sliced_entries, snapshot_of


def check_slices(whole: Replica, first: Replica, second: Replica, x: np.ndarray, y: np.ndarray) -> None:
    """Two replicas in one memory, each of which updates its own slice, end with the parameters and the state of one
    replica.

    The three replicas are equal, and may have trained before.
    """
    memory, slopes = (np.zeros(whole.gradient_length, "float32") for _ in range(2))
    parts = {first: slice(0, 13), second: slice(13, whole.gradient_length)}
    for replica in parts:
        replica.bind(memory, slopes)
    for replica in (whole, *parts):
        average.keep(replica, 0.8)
    for _ in range(3):
        whole.gradients(x, y, 1.0)
        whole.update()
        whole.average.move()
        first.gradients(x, y, 1.0)
        for replica, part in parts.items():
            replica.update(part)
            replica.average.move((part,))
        for replica in parts:
            replica.refresh()
    check_average(whole, x)
    ours, theirs = whole.state(), first.state()
    np.testing.assert_allclose(memory, ours["parameters"], rtol=2e-5, atol=1e-6)
    assert set(ours) == set(theirs)
    for entry in sliced_entries(whole):
        for replica, part in parts.items():
            np.testing.assert_allclose(elements_of(replica, entry, part), ours[entry][part], rtol=1e-4, atol=1e-6)
            theirs[entry][part] = elements_of(replica, entry, part)
    first.bind(np.empty_like(memory), np.empty_like(memory))
    first.load_state(theirs)
    for replica in (whole, first):
        replica.gradients(x, y, 1.0)
        replica.update()
    np.testing.assert_allclose(first.state()["parameters"], whole.state()["parameters"], rtol=5e-5, atol=1e-6)
    second.update(slice(5, 5))
    check_own_memory(second, x)


def check_own_memory(replica: Replica, x: np.ndarray) -> None:
    """A replica that is bound to no parameters leaves the memory of a trainer, which other ranks share or which is
    freed."""
    memory, slopes, own = np.zeros((3, replica.gradient_length), replica.gradient_dtype)
    attach(replica, memory, slopes)
    state, outputs = snapshot_of(replica, {}), replica.predict(x)
    attach(replica, None, own)
    memory[:] = slopes[:] = np.nan
    np.testing.assert_array_equal(replica.predict(x), outputs)
    for name, array in replica.state().items():
        np.testing.assert_array_equal(array, state[name])
    replica.load_state(state)
    replica.update()
    assert np.isnan([memory, slopes]).all()
    np.testing.assert_array_equal(replica.arrays()[0], replica.state()["parameters"][: len(replica.arrays()[0])])


def check_average(replica: Replica, x: np.ndarray) -> None:
    """The replica predicts with the average of its parameters, then with its parameters again."""
    state, outputs = replica.state(), replica.predict(x)
    assert not np.allclose(state["ema"], state["parameters"])
    replica.use_average()
    np.testing.assert_array_equal(replica.state()["parameters"], state["ema"])
    assert not np.allclose(replica.predict(x), outputs)
    replica.use_parameters()
    np.testing.assert_array_equal(replica.predict(x), outputs)
    np.testing.assert_array_equal(replica.state()["parameters"], state["parameters"])


def check_edits(
    make: Callable[[], Replica],
    halve: Callable[[Any], object],
    topology: Topology,
    data: tuple[np.ndarray, np.ndarray],
    kinds: Sequence[str] = ("replicated", "sharded", "central", "local"),
) -> None:
    """A change of the model by the user takes effect on all ranks. Collective. halve: halves parameters and running
    statistics of a replica's model. kinds: keys of STRATEGIES, and "local"."""

    local = partial(MirroredTrainer, allreduce="ring", average=LocalSGD(2))
    for kind in kinds:
        replica = make()
        with (STRATEGIES | {"local": local})[kind](replica, topology=topology) as trainer:
            trainer.fit(*data, 1, 25, progress=False)
            before = snapshot_of(replica, {})
            trainer.edit(partial(halve, replica))
            after = snapshot_of(replica, {})
            for name, array in before.items():
                if name == "parameters" or (name.startswith(("model.", "module.")) and array.dtype.kind == "f"):
                    np.testing.assert_array_equal(after[name], array / 2, err_msg=f"{kind}: {name}")
            trainer.fit(*data, 1, 25, progress=False)
            assert len(set(trainer.parameters_sha256())) == 1


def as_tuple(x: np.ndarray) -> Any:
    return x[:, :2], x[:, 2:]


def as_dict(x: np.ndarray) -> Any:
    return {"rest": x[:, 2:], "first": x[:, :2]}


def rows_of_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows for a model of two inputs, (rows, 2) and (rows, 4), and three classes: x, y and weights."""
    random = np.random.default_rng(0)
    return (
        random.normal(size=(32, 6)).astype("float32"),
        random.integers(0, 3, 32),
        random.integers(0, 4, 32).astype(float),
    )


def check_weights(replica: Replica, shape: Callable[[np.ndarray], Any]) -> None:
    """A row of weight 3 counts as three rows. shape: makes the inputs of an array (rows, 6)."""
    x, y, weights = rows_of_inputs()
    rows = np.repeat(np.arange(len(x)), weights.astype(int))
    buffer = np.zeros(replica.gradient_length, "float32")
    replica.bind(None, buffer)
    replica.check(shape(x), y, weights)
    loss = replica.gradients(shape(x[rows]), y[rows], 0.5 * len(rows) / len(x))[0] * len(rows) / len(x)
    wanted = buffer.copy()
    assert abs(replica.gradients(shape(x), y, 0.5, weights)[0] - loss) < 1e-4
    np.testing.assert_allclose(buffer, wanted, rtol=1e-3, atol=1e-6)
    assert abs(replica.evaluate(shape(x), y, weights)[0] / len(x) - loss) < 1e-4
    assert len(replica.predict(shape(x[:0]))) == 0
