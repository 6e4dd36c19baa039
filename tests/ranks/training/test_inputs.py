"""Several inputs and weighted rows: nested inputs, weights of a validation, and errors; the matrix has both with every
strategy and source of rows."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.training.fits import TRAINERS, Rows, X, Y, network, trainer_of
from tests.ranks.training.test_trainers import example
from trainers import Loader, MirroredTrainer, NumpyNetwork
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit.weights import ClassWeights

JOBS = "openmpi 1 2"
BATCH = 12
CLASS_WEIGHT = {0: 3.0, 2: 0.5}


class Joined(NumpyNetwork):
    """Takes {"first": (rows, 2), "rest": ((rows, 3), (rows,))} or ((rows, 2), (rows, 4)) as six features."""

    def gradients(self, x: Any, y: Any, share: float, weights: Any = None) -> Any:
        return super().gradients(joined(x), y, share, weights)

    def evaluate(self, x: Any, y: Any, weights: Any = None) -> Any:
        return super().evaluate(joined(x), y, weights)

    def predict(self, x: Any) -> np.ndarray:
        return super().predict(joined(x))

    def check(self, x: Any, y: Any, weights: Any = None) -> None:
        super().check(joined(x), y, weights)


def joined(x: Any) -> np.ndarray:
    if isinstance(x, dict):
        assert list(x) == ["first", "rest"]
        x = (x["first"], *x["rest"])
    if not isinstance(x, tuple):
        return x
    return np.concatenate([each if each.ndim == 2 else each[:, None] for each in x], axis=1)


def as_dict(x: np.ndarray) -> dict[str, Any]:
    return {"rest": (x[..., 2:5], x[..., 5]), "first": x[..., :2]}


def as_tuple(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[..., :2], x[..., 2:]


def weights() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 4, len(X))


@pytest.mark.parametrize("kind", ["sharded", "exact"])
def test_a_training_is_that_of_one_rank(kind: str, flat: allreduce.Topology) -> None:
    """Of nested inputs, and of batches with lists instead of tuples, as default_collate makes them."""
    both = weights() * [CLASS_WEIGHT.get(label, 1.0) for label in Y.tolist()]
    parts = [slice(at, at + BATCH) for at in range(0, len(X), BATCH)]
    lists = [([each[part] for each in as_tuple(X)], Y[part], weights()[part]) for part in parts]
    arrays, classes = {"batch_size": BATCH, "shuffle": False}, {"class_weight": CLASS_WEIGHT}
    found = []
    with allreduce.Topology(MPI.COMM_SELF) as alone:
        sources: list[tuple[allreduce.Topology, tuple[Any, ...], dict[str, Any]]] = [
            (alone, (X, Y), {"sample_weight": both, **arrays}),
            (flat, (as_dict(X), Y), {"sample_weight": weights().tolist(), **arrays, **classes}),
            (flat, (Loader(lists, rows="whole"),), classes),
        ]
        for topology, given, options in sources:
            with trainer_of(kind, topology, Joined([6, 8, 3], seed=1)) as trainer:
                common: Any = {"epochs": 2, "progress": False, "validation_data": (X, Y, weights())}
                history = trainer.fit(*given, **common, **options)
                scores = trainer.evaluate(as_tuple(X), Y, sample_weight=weights())
                np.testing.assert_allclose(trainer.predict(as_dict(X)), trainer.predict(X), rtol=1e-6)
                assert scores == pytest.approx(history[-1].validation)
                assert len(set(trainer.parameters_sha256())) == 1
            rows = [[epoch.loss, *epoch.metrics.values(), *epoch.validation.values()] for epoch in history]
            found.append((trainer.replica.state()["parameters"], rows))
    for parameters, its in found[1:]:
        np.testing.assert_allclose(parameters, found[0][0], rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(its, found[0][1], rtol=1e-4)


def test_balanced_classes_count_alike(flat: allreduce.Topology) -> None:
    counts = np.bincount(Y)
    balanced = len(Y) / (len(counts) * counts[Y])
    options = {"epochs": 1, "batch_size": BATCH, "progress": False}
    found = []
    for given in ({"class_weight": "balanced"}, {"sample_weight": balanced}):
        for targets in (Y, np.eye(3)[Y]):
            made = network() if targets.ndim == 1 else NumpyNetwork([6, 8, 3], loss="mean_squared_error", seed=1)
            with MirroredTrainer(made, "ring", flat) as trainer:
                trainer.fit(X, targets, **options, **given)
            found.append(made.state()["parameters"].tobytes())
    assert found[:2] == found[2:]


@pytest.mark.parametrize("row", [[0.2, 0.8, 0.0], [1, 1, 0], [0, 0, 0], [np.nan, 1, 0]])
def test_rows_that_are_not_one_hot_have_no_class(row: list[float]) -> None:
    targets = np.array([[0, 1, 0], row])
    with pytest.raises(ArgumentError, match="a row of y is not one-hot"):
        ClassWeights({0: 2.0})((targets, targets))


def bad_calls() -> list[tuple[dict[str, Any], str]]:
    """Arguments of fit, and a part of the error."""
    negative, missing = weights().astype(float), weights().astype(float)
    negative[7], missing[3] = -1, np.nan
    rows, loader = Rows(X, Y), Loader([(X, Y)], rows="whole")
    inputs: list[tuple[dict[str, Any], str]] = [
        ({"x": (X, X[:40]), "y": Y}, r"x\[0\] has shape \(50, 6\), x\[1\] has shape \(40, 6\) and y"),
        ({"x": {}, "y": Y}, "a dict without arrays"),
        ({"x": [X, X], "y": Y}, r"x is a list of 2 arrays.*give a tuple, x=\(a, b\), or a dict"),
        ({"x": as_dict(X), "y": Y}, r"NumpyNetwork takes one array as x, and got a dict of 2"),
        ({"x": rows, "class_weight": "balanced"}, "needs arrays x and y"),
        ({"x": loader, "class_weight": "balanced"}, "needs arrays x and y"),
        ({"x": rows, "sample_weight": weights()}, r"gives weights in its rows"),
        ({"x": loader, "sample_weight": weights()}, "leave out its rows, or"),
        ({"x": X, "y": X, "class_weight": dict.fromkeys(range(7), 1.0)}, "class_weight needs y of class numbers"),
        ({"x": Loader([(X, Y, negative)], rows="whole")}, "batch 1 of epoch 1: .*row 7 has -1.0"),
    ]
    of_arrays: list[tuple[dict[str, Any], str]] = [
        ({"sample_weight": negative}, "row 7 has -1.0"),
        ({"sample_weight": missing}, "row 3 has nan"),
        ({"sample_weight": weights()[1:]}, r"sample_weight has shape \(49,\)"),
        ({"sample_weight": np.ones((50, 2))}, "one number for each row"),
        ({"sample_weight": ["a"] * 50}, "must be numbers >= 0"),
        ({"sample_weight": np.zeros(50)}, "0 for all rows"),
        ({"sample_weight": Y == 0, "class_weight": {0: 0.0, 1: 2.0}}, "0 for all rows"),
        ({"class_weight": {0: 1.0, 7: 2.0}}, "class 7, and y has the classes 0, 1, 2"),
        ({"class_weight": {0: -1.0}}, "numbers >= 0 for class numbers"),
        ({"class_weight": "equal"}, "numbers >= 0 for class numbers"),
    ]
    return [*inputs, *(({"x": X, "y": Y, **given}, text) for given, text in of_arrays)]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_bad_input_is_one_error_on_all_ranks(kind: str, flat: allreduce.Topology) -> None:
    replica = network()
    with TRAINERS[kind](replica, topology=flat) as trainer:
        before = trainer.parameters_sha256()
        for given, text in bad_calls():
            with pytest.raises((ArgumentError, DataError), match=text) as caught:
                trainer.fit(**given, epochs=1, progress=False)
            assert caught.value.ranks == tuple(range(flat.size)), text  # type: ignore[attr-defined]
        assert trainer.parameters_sha256() == before
        if flat.size > 1:
            others = {f"{'third' if flat.rank == 1 else 'first'}": X, "second": X}
            for x, weighs in ((others, None), (X, weights() + (flat.rank == 1)), (X, None if flat.rank else weights())):
                with pytest.raises((DisagreementError, ArgumentError)):
                    trainer.fit(x, Y, sample_weight=weighs, progress=False)
        assert trainer.parameters_sha256() == before
    with MirroredTrainer(example("Line")(6), "ring", flat) as trainer:  # a replica that knows no weights
        trainer.fit(X, X[:, 0], 1, progress=False)
        with pytest.raises(ArgumentError, match="this Line can't weigh rows"):
            trainer.fit(X, X[:, 0], 1, sample_weight=weights(), progress=False)


def test_a_resumed_training_has_the_same_weights(flat: allreduce.Topology, folder: Path) -> None:
    weighed = {"class_weight": CLASS_WEIGHT}
    with MirroredTrainer(network(), "ring", flat) as trainer:
        fit = partial(trainer.fit, X, Y, checkpoint=str(folder), progress=False)
        fit(1, **weighed)
        for others in ({}, {"class_weight": {0: 2.0}}, {"sample_weight": weights()}):
            with pytest.raises(CheckpointError):
                fit(2, resume=True, **others)
        assert len(fit(2, resume=True, **weighed)) == 2
