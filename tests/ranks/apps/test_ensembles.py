"""Ensembles on several ranks: the members of one rank, members that fail, files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests.ranks.together import raised_everywhere
from trainers import Loader, NumpyNetwork, datasets
from trainers.apps.ensemble.ensemble import EnsembleTrainer
from trainers.apps.ensemble.model import EnsembleModel
from trainers.errors import ArgumentError, DivergedError
from trainers.watching.callback import Callback

MEMBERS, ROWS = 5, 301


def make(seed: int) -> NumpyNetwork:
    network = NumpyNetwork([64, 12, 10], seed=seed)
    network.scale_input(0.0, 1 / 16)
    return network


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    digits = datasets.load("digits")
    return digits.x_train[:ROWS], digits.y_train[:ROWS]


@pytest.mark.parametrize(("bagging", "ranks_per_member"), [("rows", None), ("shards", 1), (None, 2)])
def test_members_do_not_depend_on_the_ranks(
    bagging: str | None, ranks_per_member: int | None, rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology
) -> None:
    x, y = rows
    given: dict[str, Any] = {"members": MEMBERS, "bagging": bagging, "seed": 3}
    fits: dict[str, Any] = {"epochs": 2, "batch_size": 60, "validation_data": (x[:80], y[:80]), "progress": False}
    together = {"topology": flat, "ranks_per_member": min(ranks_per_member or 1, flat.size)}
    with (
        flat.split(flat.rank) as alone,
        EnsembleTrainer(make, **given, topology=alone) as first,
        EnsembleTrainer(make, **given, **together) as second,
    ):
        expected, found = first.fit(x, y, **fits), second.fit(x, y, **fits)
        for one, other in zip(expected, found, strict=True):
            assert (one.seed, one.error) == (other.seed, other.error)
            for name in ("epoch", "loss", "validation_loss"):
                np.testing.assert_allclose(one.history.column(name), other.history.column(name), rtol=1e-4)
        assert len({round(each.history[0].loss, 6) for each in found}) == MEMBERS
        np.testing.assert_allclose(first.predict(x), second.predict(x), atol=1e-4)
        assert first.oob.keys() == second.oob.keys() == ({"loss", "accuracy", "rows"} if bagging == "rows" else set())
        for name, value in first.oob.items():
            assert second.oob[name] == pytest.approx(value, abs=1e-2)
        scores, own = second.evaluate(x, y), second.evaluate_members(x, y)
        assert scores["accuracy"] == pytest.approx((first.predict(x).argmax(axis=1) == y).mean(), abs=0.01)
        for number, metrics in first.evaluate_members(x, y).items():
            assert own[number] == pytest.approx(metrics, abs=0.01)


class Breaks(NumpyNetwork):
    """A network that raises, or predicts NaN for rows of zeros, if it is told to."""

    raises = nan = False

    def predict(self, x: Any) -> Any:
        if self.raises:
            raise OSError("no such table")
        found = super().predict(x)
        found[self.nan & ~x.any(axis=1)] = np.nan
        return found


def test_members_that_raise_or_predict_nan(
    rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    x = rows[0][:9].copy()
    x[0] = 0  # the ranks of a part divide the rows
    for voting in ("soft", "hard"):
        with EnsembleTrainer(lambda seed: Breaks([64, 12, 10], seed=seed), 3, topology=flat, voting=voting) as ensemble:
            expected, broken = ensemble.predict(x), ensemble.replicas.get(1)
            if broken is not None:
                broken.nan = True  # type: ignore[attr-defined]
            found = ensemble.predict(x)
            assert np.isnan(found[0]).all()
            np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-6)
            if broken is not None:
                broken.raises = True  # type: ignore[attr-defined]
            assert "no such table" in raised_everywhere(world, OSError, lambda: ensemble.predict(x))
            assert "no such table" in raised_everywhere(world, OSError, lambda: ensemble.fit(*rows))


def test_members_whose_outputs_differ_in_shape(
    rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    with EnsembleTrainer(make, 3, topology=flat, seed=4) as ensemble:
        third = ensemble.seeds[2]

    def uneven(seed: int) -> NumpyNetwork:
        return NumpyNetwork([64, 11 if seed == third else 10], seed=seed)

    with EnsembleTrainer(uneven, 3, topology=flat, seed=4) as ensemble:
        for call in (lambda: ensemble.fit(*rows), lambda: ensemble.predict(rows[0])):
            text = raised_everywhere(world, ArgumentError, call)
            assert "member 2: float32 of shape (11,)" in text
            assert "member 0: float32 of shape (10,)" in text
        assert ensemble.missing == {}


class RaisesOnLastRank(Callback):
    """Raises on the last rank of those that train a member."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.trainer.group.rank == self.trainer.group.size - 1:
            raise ValueError("no disk")


def test_the_others_continue_without_a_member_that_fails(
    rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology, world: MPI.Intracomm, folder: Path
) -> None:
    x, y = rows

    def watching(number: int) -> list[Callback]:
        return [RaisesOnLastRank()] if number == 1 else []

    def diverges(seed: int) -> NumpyNetwork:
        network = make(seed)
        if seed == ensemble_seeds[2]:
            network.parameters[:] = np.inf
        return network

    with EnsembleTrainer(make, 4, topology=flat) as ensemble:
        ensemble_seeds = ensemble.seeds
    with EnsembleTrainer(diverges, 4, topology=flat) as ensemble:
        members = ensemble.fit(x, y, 1, callbacks=watching, progress=False)
        assert [bool(each.error) for each in members] == [False, True, True, False]
        assert "ValueError" in members[1].error
        assert "no disk" in members[1].error
        assert "DivergedError" in members[2].error
        assert ensemble.missing == {1: members[1].error, 2: members[2].error}
        assert np.isfinite(ensemble.predict(x)).all()
        assert ensemble.evaluate_members(x, y).keys() == {0, 3}
        path = str(folder) + ".npz"
        ensemble.save(path)
        expected = ensemble.predict(x)
        loaded = EnsembleModel.load(path)
        assert (loaded.members, loaded.missing) == (2, ensemble.missing)
        np.testing.assert_allclose(loaded.predict(x), expected, rtol=1e-5)
    with EnsembleTrainer(lambda seed: diverges(ensemble_seeds[2]), 2, topology=flat) as other:
        assert "NaN" in raised_everywhere(world, DivergedError, lambda: other.fit(x, y, 1, progress=False))


def test_a_loader_gives_the_rows_of_a_fit(rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology) -> None:
    def collate(pairs: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([x for x, _ in pairs]), np.array([int(y) for _, y in pairs])

    names = [(x, str(y)) for x, y in zip(*rows, strict=True)]
    found, lines = [], io.StringIO()
    for given in (rows, Loader(rows, prefetch=True), Loader(names, collate=collate)):
        x, y = (given, None) if isinstance(given, Loader) else given
        with EnsembleTrainer(make, 2, topology=flat, bagging="rows") as ensemble:
            ensemble.fit(x, y, 1, 60, validation_data=given, progress=lines)
            found.append((ensemble.missing, ensemble.predict(rows[0]).tolist()))
    assert found[0][0] == {}
    assert found[1:] == found[:1] * 2
    assert flat.rank > 0 or lines.getvalue().count("member 1 of 2: epoch") == 3


def test_bad_arguments_raise_the_same_error_on_all_ranks(
    rows: tuple[np.ndarray, np.ndarray], flat: allreduce.Topology, world: MPI.Intracomm
) -> None:
    def text(**given: Any) -> str:
        return raised_everywhere(world, ArgumentError, lambda: EnsembleTrainer(make, topology=flat, **given))

    assert "members must be an integer >= 1, got 0" in text(members=0)
    assert 'use "rows", "shards" or None' in text(bagging="columns")
    assert "this job has" in text(ranks_per_member=flat.size + 1)
    assert "every member has its own topology" in text(trainer={"topology": flat})
    assert "voting='loud' is unknown" in text(voting="loud")

    def refuses(seed: int) -> NumpyNetwork:
        if flat.rank == flat.size - 1:
            raise OSError("no such model")
        return make(seed)

    assert "no such model" in raised_everywhere(world, OSError, lambda: EnsembleTrainer(refuses, topology=flat))
    with EnsembleTrainer(make, 7, topology=flat, bagging="shards") as ensemble:
        few = rows[0][:6], rows[1][:6]
        text_of_few = raised_everywhere(world, ArgumentError, lambda: ensemble.fit(*few, validation_data=few))
        assert "6 rows for 7 members" in text_of_few
        loader, given = Loader([rows], rows="whole"), {"validation_data": rows}
        text_of_batches = raised_everywhere(world, ArgumentError, lambda: ensemble.fit(loader, **given))
        assert "members take rows by number" in text_of_batches
        assert "64 features" in raised_everywhere(world, ArgumentError, lambda: ensemble.predict(rows[0][:, :9]))
    with pytest.raises(allreduce.errors.ClosedError):
        ensemble.predict(rows[0])
