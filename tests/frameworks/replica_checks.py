"""Checks that every replica must pass, whatever its framework. For tests, and for the jobs that they start."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from trainers.replica import Replica


def check_slices(whole: Replica, first: Replica, second: Replica, x: np.ndarray, y: np.ndarray) -> None:
    """Two replicas in one memory, each of which updates its own slice, end with the parameters and the state of one
    replica.

    The three replicas are equal, and may have trained before.
    """
    memory, slopes = (np.zeros(whole.gradient_length, "float32") for _ in range(2))
    parts = {first: slice(0, 13), second: slice(13, whole.gradient_length)}
    for replica in parts:
        replica.bind_parameters(memory)
        replica.bind(slopes)
    for replica in (whole, *parts):
        replica.keep_average(0.8)
    for _ in range(3):
        whole.gradients(x, y, 1.0)
        whole.update()
        whole.move_average()
        first.gradients(x, y, 1.0)
        for replica, part in parts.items():
            replica.update(part)
            replica.move_average(part)
        for replica in parts:
            replica.refresh()
    check_average(whole, x)
    ours, theirs = whole.state(), first.state()
    np.testing.assert_allclose(memory, ours["parameters"], rtol=2e-5, atol=1e-6)
    assert set(ours) == set(theirs)
    for entry in whole.elementwise:
        for replica, part in parts.items():
            np.testing.assert_allclose(replica.elements(entry, part), ours[entry][part], rtol=1e-4, atol=1e-6)
            theirs[entry][part] = replica.elements(entry, part)
    first.bind_parameters(np.empty_like(memory))
    first.load_state(theirs)
    for replica in (whole, first):
        replica.gradients(x, y, 1.0)
        replica.update()
    np.testing.assert_allclose(first.state()["parameters"], whole.state()["parameters"], rtol=5e-5, atol=1e-6)
    second.update(slice(5, 5))


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


def check_training(
    made: Mapping[str, Callable[[], Any]], learned: Callable[[Any], Any], wanted: np.ndarray, history: Any, batch: Any
) -> None:
    """Each trainer, by name, must give the parameters and the history of one rank alone. Collective.

    learned: trains with a trainer; returns its parameters and its history. batch: for a step of each replica without a
    trainer, at the end.
    """
    for name, make in made.items():
        with make() as trainer:
            found, its = learned(trainer)
            np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=name)
            np.testing.assert_allclose([e.loss for e in its], [e.loss for e in history], rtol=1e-3, err_msg=name)
            assert MPI.COMM_WORLD.bcast(found.tobytes()) == found.tobytes(), name
        np.testing.assert_array_equal(trainer.replica.state()["parameters"], found, err_msg=name)
        trainer.replica.gradients(*batch, 1.0)  # with memory of its own again
        trainer.replica.update()
