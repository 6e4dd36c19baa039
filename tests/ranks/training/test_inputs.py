"""Several inputs and weighted rows: nested inputs, weights of a validation, and errors; the matrix has both with every
strategy and source of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.training.fits import TRAINERS, Rows, data, network, trainer_of
from tests.ranks.training.test_trainers import example
from trainers import Checkpoint, Loader, MirroredTrainer, NumpyNetwork
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit.weights import ClassWeights

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
    return np.random.default_rng(5).integers(0, 4, len(data()[0]))


class Triples(Rows):
    """Rows whose x is a dict, with weights."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return as_dict(x), y, weights()[row]


def lists() -> list[Any]:
    """Return batches of triples, x as default_collate makes it: lists instead of tuples."""
    parts = [slice(at, at + BATCH) for at in range(0, len(data()[0]), BATCH)]
    x, y = data()
    return [([each[part] for each in as_tuple(x)], y[part], weights()[part]) for part in parts]


@pytest.mark.parametrize("kind", ["sharded", "exact"])
def test_a_training_is_that_of_one_rank(kind: str, flat: allreduce.Topology) -> None:
    x, y = data()
    arrays = {"batch_size": BATCH, "shuffle": False}
    classes = {"class_weight": CLASS_WEIGHT}
    both = weights() * [CLASS_WEIGHT.get(label, 1.0) for label in y.tolist()]
    sources: list[tuple[Any, dict[str, Any]]] = [
        ((x, y), {"sample_weight": both, **arrays}),
        ((as_dict(x), y), {"sample_weight": weights().tolist(), **arrays, **classes}),
        ((Loader(Triples(x, y), prefetch=True),), arrays | classes),
        ((Loader(lists(), rows="whole"),), classes),
    ]
    found = []
    with allreduce.Topology(MPI.COMM_SELF) as alone:
        for topology, of in ((alone, sources[:1]), (flat, sources[1:])):
            for given, options in of:
                with trainer_of(kind, topology, Joined([6, 8, 3], seed=1)) as trainer:
                    common: Any = {"epochs": 2, "progress": False, "validation_data": (x, y, weights())}
                    history = trainer.fit(*given, **common, **options)
                    scores = trainer.evaluate(as_tuple(x), y, sample_weight=weights())
                    np.testing.assert_allclose(trainer.predict(as_dict(x)), trainer.predict(x), rtol=1e-6)
                    assert scores == pytest.approx(history[-1].validation)
                    assert len(set(trainer.parameters_sha256())) == 1
                rows = [[epoch.loss, *epoch.metrics.values(), *epoch.validation.values()] for epoch in history]
                found.append((trainer.replica.state()["parameters"], rows))
    for parameters, its in found[1:]:
        np.testing.assert_allclose(parameters, found[0][0], rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(its, found[0][1], rtol=1e-4)


def test_balanced_classes_count_alike(flat: allreduce.Topology) -> None:
    x, y = data()
    counts = np.bincount(y)
    balanced = len(y) / (len(counts) * counts[y])
    options = {"epochs": 1, "batch_size": BATCH, "progress": False}
    found = []
    for given in ({"class_weight": "balanced"}, {"sample_weight": balanced}):
        for targets in (y, np.eye(3)[y]):
            made = network() if targets.ndim == 1 else NumpyNetwork([6, 8, 3], loss="mean_squared_error", seed=1)
            with MirroredTrainer(made, "ring", flat) as trainer:
                trainer.fit(x, targets, **options, **given)
            found.append(made.state()["parameters"].tobytes())
    assert found[:2] == found[2:]


@pytest.mark.parametrize("row", [[0.2, 0.8, 0.0], [1, 1, 0], [0, 0, 0], [np.nan, 1, 0]])
def test_rows_that_are_not_one_hot_have_no_class(row: list[float]) -> None:
    targets = np.array([[0, 1, 0], row])
    with pytest.raises(ArgumentError, match="a row of y is not one-hot"):
        ClassWeights({0: 2.0})((targets, targets))


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    """Arguments of fit, and a part of the error."""
    x, y = data()
    negative, missing = weights().astype(float), weights().astype(float)
    negative[7], missing[3] = -1, np.nan
    return {
        "rows of inputs": ({"x": (x, x[:40]), "y": y}, r"x\[0\] has shape \(50, 6\), x\[1\] has shape \(40, 6\) and y"),
        "no input": ({"x": {}, "y": y}, "a dict without arrays"),
        "a list of inputs": ({"x": [x, x], "y": y}, r"x is a list of 2 arrays.*give a tuple, x=\(a, b\), or a dict"),
        "several inputs": ({"x": as_dict(x), "y": y}, r"NumpyNetwork takes one array as x, and got a dict of 2"),
        "negative": ({"x": x, "y": y, "sample_weight": negative}, "row 7 has -1.0"),
        "NaN": ({"x": x, "y": y, "sample_weight": missing}, "row 3 has nan"),
        "another length": ({"x": x, "y": y, "sample_weight": weights()[1:]}, r"sample_weight has shape \(49,\)"),
        "2-D": ({"x": x, "y": y, "sample_weight": np.ones((50, 2))}, "one number for each row"),
        "words": ({"x": x, "y": y, "sample_weight": ["a"] * 50}, "must be numbers >= 0"),
        "zeros": ({"x": x, "y": y, "sample_weight": np.zeros(50)}, "0 for all rows"),
        "zeros by class": (
            {"x": x, "y": y, "sample_weight": y == 0, "class_weight": {0: 0.0, 1: 2.0}},
            "0 for all rows",
        ),
        "unknown class": ({"x": x, "y": y, "class_weight": {0: 1.0, 7: 2.0}}, "class 7, and y has the classes 0, 1, 2"),
        "a negative class": ({"x": x, "y": y, "class_weight": {0: -1.0}}, "numbers >= 0 for class numbers"),
        "a word": ({"x": x, "y": y, "class_weight": "equal"}, "numbers >= 0 for class numbers"),
        "balanced rows": ({"x": Rows(x, y), "class_weight": "balanced"}, "needs arrays x and y"),
        "balanced batches": (
            {"x": Loader([(x, y)], rows="whole"), "class_weight": "balanced"},
            "needs arrays x and y",
        ),
        "weights of a data set": ({"x": Rows(x, y), "sample_weight": weights()}, r"gives weights in its rows"),
        "weights of a loader": (
            {"x": Loader([(x, y)], rows="whole"), "sample_weight": weights()},
            "leave out its rows, or",
        ),
        "no classes": (
            {"x": x, "y": x, "class_weight": {0: 1.0, 1: 2.0, 2: 0.0, 3: 4.0, 4: 1.0, 5: 1.0, 6: 1.0}},
            "class",
        ),
        "a loader's weights": ({"x": Loader([(x, y, negative)], rows="whole")}, "batch 1 of epoch 1: .*row 7 has -1.0"),
    }


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_bad_input_is_one_error_on_all_ranks(kind: str, flat: allreduce.Topology) -> None:
    replica = network()
    with TRAINERS[kind](replica, topology=flat) as trainer:
        before = trainer.parameters_sha256()
        for name, (given, text) in bad_calls().items():
            with pytest.raises((ArgumentError, DataError), match=text) as caught:
                trainer.fit(**given, epochs=1, progress=False)
            assert caught.value.ranks == tuple(range(flat.size)), name  # type: ignore[attr-defined]
        assert trainer.parameters_sha256() == before
        x, y = data()
        if flat.size > 1:
            others = {f"{'third' if flat.rank == 1 else 'first'}": x, "second": x}
            for given in (
                (others, y, None),
                (x, y, weights() + (flat.rank == 1)),
                (x, y, None if flat.rank else weights()),
            ):
                with pytest.raises((DisagreementError, ArgumentError)):
                    trainer.fit(*given[:2], sample_weight=given[2], progress=False)
        assert trainer.parameters_sha256() == before
    with MirroredTrainer(example("Line")(6), "ring", flat) as trainer:  # a replica that knows no weights
        trainer.fit(x, x[:, 0], 1, progress=False)
        with pytest.raises(ArgumentError, match="this Line can't weigh rows"):
            trainer.fit(x, x[:, 0], 1, sample_weight=weights(), progress=False)


def test_a_resumed_training_has_the_same_weights(flat: allreduce.Topology, folder: Path) -> None:
    x, y = data()
    checkpoint = Checkpoint(str(folder))
    with MirroredTrainer(network(), "ring", flat) as trainer:
        trainer.fit(x, y, 1, class_weight=CLASS_WEIGHT, checkpoint=checkpoint, progress=False)
        for others in ({}, {"class_weight": {0: 2.0}}, {"sample_weight": weights()}):
            with pytest.raises(CheckpointError):
                trainer.fit(x, y, 2, checkpoint=checkpoint, resume=True, progress=False, **others)
        assert (
            len(trainer.fit(x, y, 2, class_weight=CLASS_WEIGHT, checkpoint=checkpoint, resume=True, progress=False))
            == 2
        )
