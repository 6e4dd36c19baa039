"""Several inputs and weighted rows: the training is that of one rank, for every strategy and every source of rows."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from allreduce.errors import DisagreementError
from tests.ranks.training import fits
from tests.ranks.training.fits import data, network
from trainers import (
    Accumulate,
    Checkpoint,
    Exact,
    Loader,
    LocalSGD,
    MirroredTrainer,
    NumpyNetwork,
    Replica,
)
from trainers.errors import ArgumentError, CheckpointError, DataError
from trainers.fit.weights import ClassWeights

EPOCHS, BATCH = 2, 12
CLASS_WEIGHT = {0: 3.0, 2: 0.5}
TRAINERS = fits.TRAINERS | {"exact": functools.partial(MirroredTrainer, average=Exact(micro_batch=5))}


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
    return (
        np.concatenate([each if each.ndim == 2 else each[:, None] for each in x], axis=1) if isinstance(x, tuple) else x
    )


def as_dict(x: np.ndarray) -> dict[str, Any]:
    return {"rest": (x[..., 2:5], x[..., 5]), "first": x[..., :2]}


def as_tuple(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[..., :2], x[..., 2:]


def weights() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 4, len(data()[0]))


def of_classes() -> np.ndarray:
    return np.array([CLASS_WEIGHT.get(label, 1.0) for label in data()[1].tolist()])


class Rows:
    """A data set of triples whose x is a dict."""

    def __len__(self) -> int:
        return len(data()[0])

    def __getitem__(self, row: int) -> Any:
        x, y = data()
        return as_dict(x[row]), y[row], weights()[row]


def trained(make: Callable[..., Any], topology: allreduce.Topology, *given: Any, **options: Any) -> list[Any]:
    """Return the parameters, and the losses and accuracies of the epochs, of the validation, and of `evaluate`."""
    x, y = data()
    with make(Joined([6, 8, 3], seed=1), topology=topology) as trainer:
        history = trainer.fit(*given, epochs=EPOCHS, progress=False, validation_data=(x, y, weights()), **options)
        scores = trainer.evaluate(as_tuple(x), y, sample_weight=weights())
        np.testing.assert_allclose(trainer.predict(as_dict(x)), trainer.predict(x), rtol=1e-6)
        assert len(set(trainer.parameters_sha256())) == 1
    assert scores == pytest.approx(history[-1].validation)
    rows = [[epoch.loss, *epoch.metrics.values(), *epoch.validation.values()] for epoch in history]
    return [trainer.replica.state()["parameters"], rows]


def on_one_rank(row_weights: np.ndarray | None) -> list[Any]:
    """Train on plain arrays with one rank, and no class weights."""
    x, y = data()
    with allreduce.Topology(MPI.COMM_SELF) as alone:
        return trained(TRAINERS["replicated"], alone, x, y, batch_size=BATCH, sample_weight=row_weights, shuffle=False)


def loader(x: Any) -> Iterator[Any]:
    """Batches of triples, x as default_collate makes it: lists instead of tuples."""
    _, y = data()
    for begin in range(0, len(y), BATCH):
        part = slice(begin, begin + BATCH)
        yield [[each[part] for each in as_tuple(x)], y[part], weights()[part]]


class Source:
    def __iter__(self) -> Iterator[Any]:
        return loader(data()[0])


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_training_is_that_of_one_rank(kind: str, flat: allreduce.Topology) -> None:
    if kind == "sync" and flat.size == 1:
        pytest.skip("a server needs a worker")
    x, y = data()
    train = functools.partial(trained, TRAINERS[kind], flat)
    arrays = {"batch_size": BATCH, "shuffle": False}
    both = weights() * of_classes()
    accumulate = {} if kind == "exact" else {"transforms": [Accumulate(3)]}
    found = [
        (None, train(as_tuple(x), y, **arrays)),
        (of_classes(), train(as_dict(x), y, class_weight=CLASS_WEIGHT, **arrays, **accumulate)),
        (both, train(x, y, class_weight=CLASS_WEIGHT, sample_weight=weights().tolist(), **arrays)),
        (both, train(Loader(Rows(), prefetch=True), class_weight=CLASS_WEIGHT, **arrays)),
    ]
    if kind != "spare":
        server = kind == "sync" and flat.rank == flat.size - 1
        batches = None if server else Source()
        found.append((both, train(Loader(batches, rows="whole"), class_weight=CLASS_WEIGHT)))
    for row_weights, (parameters, history) in found:
        expected, its = on_one_rank(row_weights)
        np.testing.assert_allclose(parameters, expected, rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(history, its, rtol=1e-4)


def test_local_sgd_weighs_rows(flat: allreduce.Topology) -> None:
    """After one step of gradient descent on equal shares, the mean of the parameters is that of a step of all ranks."""
    x, y = data()
    rows = 8 * flat.size
    found = []
    for options in ({"average": LocalSGD(1)}, {}):
        made = NumpyNetwork([6, 8, 3], optimizer="sgd", seed=1)
        with MirroredTrainer(made, "ring", flat, **options) as trainer:
            given = {"sample_weight": weights()[:rows], "class_weight": CLASS_WEIGHT}
            history = trainer.fit(x[:rows], y[:rows], 2, rows // 2, progress=False, **given)
        found.append([*made.state()["parameters"], *(epoch.loss for epoch in history)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-6)


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


class Weightless(Replica):
    """A replica of a user's, which knows no weights."""

    def __init__(self) -> None:
        self.inner = network()
        self.gradient_length, self.metrics = self.inner.gradient_length, self.inner.metrics
        for name in ("bind", "update", "predict", "others", "load_others", "optimizer_state"):
            setattr(self, name, getattr(self.inner, name))

    def gradients(self, x: Any, y: Any, share: float) -> Any:
        return self.inner.gradients(x, y, share)

    def evaluate(self, x: Any, y: Any) -> Any:
        return self.inner.evaluate(x, y)

    bind = update = predict = lambda self: None  # type: ignore[assignment]


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
        "balanced rows": ({"x": Rows(), "class_weight": "balanced"}, "needs arrays x and y"),
        "balanced batches": (
            {"x": Loader([(x, y)], rows="whole"), "class_weight": "balanced"},
            "needs arrays x and y",
        ),
        "weights of a data set": ({"x": Rows(), "sample_weight": weights()}, r"gives weights in its rows"),
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
    with MirroredTrainer(Weightless(), "ring", flat) as trainer:
        trainer.fit(x, y, 1, progress=False)
        with pytest.raises(ArgumentError, match="this Weightless can't weigh rows"):
            trainer.fit(x, y, 1, sample_weight=weights(), progress=False)


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
