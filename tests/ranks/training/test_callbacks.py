"""Callbacks in real fits: they have the same effect on all ranks, and callbacks on some ranks only block no rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
import trainers
from allreduce.errors import DisagreementError
from tests.ranks.training.fits import TRAINERS
from tests.trace_schema import check_trace
from trainers import NumpyNetwork, Schedule
from trainers.callbacks import EarlyStopping, ModelCheckpoint, Timeline
from trainers.trainer import Trainer
from trainers.watching.history import History

SIZE = MPI.COMM_WORLD.size
X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
pytestmark = pytest.mark.skipif(SIZE > 3, reason="callbacks do not know how many ranks there are")


def trainer_of(flat: allreduce.Topology, kind: str = "replicated") -> Trainer:
    return TRAINERS[kind](NumpyNetwork([4, 8, 3], seed=1, optimizer="momentum", lr=0.02), topology=flat)


RUIN = Schedule(lambda step: 1.0 if step < 6 else 150.0)  # from the third epoch on


def fit(trainer: Trainer, *callbacks: Any, epochs: int = 4, **options: Any) -> History:
    return trainer.fit(X, Y, epochs, 20, validation_data=(X, Y), callbacks=callbacks, progress=False, **options)


@pytest.fixture
def folder(tmp_path: Path, world: MPI.Intracomm) -> Path:
    """Return rank 0's folder, on all ranks."""
    return world.bcast(tmp_path)


@pytest.mark.parametrize("kind", ["replicated", *["sharded", "central", "sync", "spare"] * (SIZE == 3)])
def test_the_best_weights_come_back(kind: str, flat: allreduce.Topology, folder: Path, world: MPI.Intracomm) -> None:
    """The rates ruin the model from the third epoch on; the final model is that of the second epoch. Saving the models
    changes nothing, a file holds the model of its epoch, and a trace has the parts of all ranks."""
    stopping, saving = EarlyStopping(patience=1, restore_best_weights=True), ModelCheckpoint(folder / "{epoch}.npz")
    timeline = Timeline(folder / "trace.json")
    with trainer_of(flat, kind) as trainer:
        history = fit(trainer, stopping, saving, timeline, transforms=[RUIN])
        assert len(history) == 3
        measured = trainer.evaluate(X, Y)
        assert measured["loss"] == pytest.approx(history[1].validation["loss"], rel=1e-6)
        assert measured["loss"] < history[2].validation["loss"]
        restored = trainer.parameters_sha256()
        assert len(set(restored)) == 1
        assert trainer.replica.learning_rates == [0.02]
        assert sorted(path.name for path in folder.glob("*.npz")) == ["1.npz", "2.npz", "3.npz"]
        trainer.load(str(folder / "1.npz"))
        assert trainer.evaluate(X, Y)["loss"] == pytest.approx(history[0].validation["loss"], rel=1e-6)
    with trainer_of(flat, kind) as trainer:
        fit(trainer, epochs=2)
        assert trainer.parameters_sha256() == restored
    world.Barrier()
    events = check_trace(json.loads((folder / "trace.json").read_text()), SIZE)
    assert {"data", "compute", "update"} < {event["cat"] for event in events}


class Gathers(trainers.callbacks.Callback):
    """A callback that communicates. seen: the numbers of all ranks, for each epoch."""

    collective = True

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.seen.append(self.trainer.group.values(self.trainer.group.rank, "Gathers"))


class RaisesOnOneRank(trainers.callbacks.Callback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self.fails)

    def fails(self, epoch: int, *_: Any) -> None:
        if epoch == 2 and self.trainer.group.rank == SIZE - 1:
            raise ArithmeticError("of one rank's callback")


@pytest.mark.parametrize("event", ["between_steps", "on_epoch_end"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_an_error_of_one_rank_beside_callbacks_that_communicate(
    kind: str, event: str, flat: allreduce.Topology
) -> None:
    with trainer_of(flat, kind) as trainer:
        gathers = Gathers()
        with pytest.raises(Exception, match="of one rank's callback"):
            fit(trainer, RaisesOnOneRank(event), trainers.callbacks.CheckDivergence(every=1), gathers)
        assert gathers.seen == 2 * [[*range(SIZE)]]


@pytest.mark.skipif(SIZE == 1, reason="one rank is all ranks")
def test_what_all_ranks_must_have(flat: allreduce.Topology, folder: Path) -> None:
    with trainer_of(flat) as trainer:
        before = trainer.parameters_sha256()
        for made in (ModelCheckpoint(folder / "m.npz"), EarlyStopping(restore_best_weights=True)):
            name = type(made).__name__
            with pytest.raises(DisagreementError, match=f"callbacks that communicate: .*{name}"):
                fit(trainer, *[made] * (trainer.rank == 0))
        assert trainer.parameters_sha256() == before
        assert list(folder.iterdir()) == []
