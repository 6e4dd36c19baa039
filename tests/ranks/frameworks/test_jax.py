"""Trainers with JaxReplica; the matrix has more."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.frameworks.test_jax import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before JAX is imported
jax = pytest.importorskip("jax", reason="JAX is not installed in this environment")
optax = pytest.importorskip("optax", reason="optax is not installed in this environment")

import jax.numpy as jnp  # noqa: E402

import allreduce  # noqa: E402
from tests.frameworks.replica_checks import as_dict, as_tuple, check_edits, check_weights  # noqa: E402
from tests.ranks.together import raised  # noqa: E402
from trainers import EMA, Accumulate, ClipNorm, Loader, MirroredTrainer  # noqa: E402
from trainers.errors import ArgumentError  # noqa: E402
from trainers.replica import copy_of  # noqa: E402
from trainers.replicas.jax import JaxReplica  # noqa: E402

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(50, 6)), RANDOM.integers(0, 4, 50)


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"][0] + params["b"]) @ params["w"][1]


def loss(output: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()


def accuracy(output: Any, y: Any) -> Any:
    return (output.argmax(1) == y).mean()


def replica(seed: int = 0, **options: Any) -> JaxReplica:
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape).astype("float32") for shape in ((6, 7), (7, 4))]
    params = {"w": weights, "b": np.zeros(7, "float32")}
    return JaxReplica(apply, loss, params, optax.adam(0.02), {"accuracy": accuracy}, **options)


def test_the_user_edits_parameters(flat: allreduce.Topology) -> None:
    def halve(replica: JaxReplica) -> None:
        replica.params = jax.tree.map(lambda leaf: leaf / 2, replica.params)

    check_edits(replica, halve, flat, (X, Y), ["sharded", "local"])
    made = replica()
    with pytest.raises(ArgumentError, match="a tree like the one of this JaxReplica"):
        made.params = {**made.params, "b": np.zeros(6, "float32")}


def test_several_inputs_and_weights() -> None:
    random = np.random.default_rng(1)
    params = [random.normal(size=shape).astype("float32") for shape in ((2, 3), (4, 3))]

    def added(params: Any, x: Any) -> Any:
        first, rest = (x["first"], x["rest"]) if isinstance(x, dict) else x
        return first @ params[0] + jnp.tanh(rest @ params[1])

    check_weights(JaxReplica(added, loss, params, optax.adam(0.02)), as_tuple if rank else as_dict)


def test_bfloat16(flat: allreduce.Topology, folder: Path) -> None:
    """Equal bits on all ranks; as float32 to bfloat16's rounding; a saved model loads with either precision."""
    steps, options = [ClipNorm(1.0), EMA(0.9)], {"epochs": 1, "batch_size": 16, "progress": False}
    with flat.split(rank) as alone, MirroredTrainer(replica(), "native", alone) as trainer:
        history = trainer.fit(X, Y, **options, transforms=steps)
        wanted = trainer.replica.state()["parameters"].copy()
    with MirroredTrainer(replica(rank, precision="bfloat16"), "shared", flat, update="sharded") as trainer:
        losses = trainer.fit(X, Y, **options, transforms=[Accumulate(2), *steps])
        found = trainer.replica.state()["parameters"].copy()
        assert len(set(trainer.parameters_sha256())) == 1
        outputs = trainer.predict(X, ema=False)
        trainer.save(str(folder))
        copied = copy_of(trainer.replica)
    np.testing.assert_allclose(found, wanted, atol=0.05)
    np.testing.assert_allclose([each.loss for each in losses], [each.loss for each in history], rtol=0.02)
    assert found.dtype == outputs.dtype == np.float32
    assert (found != wanted).any()
    np.testing.assert_array_equal(copied.predict(X), outputs)
    with MirroredTrainer(replica(rank), "auto", flat) as trainer:
        trainer.load(str(folder))
        np.testing.assert_allclose(trainer.predict(X, ema=False), outputs, atol=0.05)
        assert (trainer.predict(X, ema=False) != outputs).any()
    assert "losses are scaled" in raised(ArgumentError, lambda: replica(precision="float16"))


def test_a_loss_that_is_no_mean_over_rows_is_refused(topology_of: Callable[[None], allreduce.Topology]) -> None:
    def ignoring(output: Any, y: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(output, y)
        return (losses * (y > 0)).sum() / (y > 0).sum()

    made = JaxReplica(apply, ignoring, replica().params, optax.adam(0.02))
    with MirroredTrainer(made, "ring", topology_of(None)) as trainer:
        with pytest.raises(ArgumentError, match="the loss ignoring is no mean over the rows"):
            trainer.fit(X, Y, 1, 20, transforms=[Accumulate(2)], progress=False)
        with pytest.raises(ArgumentError, match="the loss ignoring is no mean over the rows"):
            trainer.fit(Loader([(X[:20], Y[:20])], rows="whole"), epochs=1, transforms=[Accumulate(2)], progress=False)
