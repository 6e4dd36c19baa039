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
from trainers import MirroredTrainer, NumpyNetwork, Schedule
from trainers.callbacks import EarlyStopping, ModelCheckpoint, Timeline
from trainers.watching.history import History

SIZE = MPI.COMM_WORLD.size
X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = np.arange(60) % 3
pytestmark = pytest.mark.skipif(SIZE > 3, reason="callbacks do not know how many ranks there are")
UPDATES = pytest.mark.parametrize("update", ["replicated", "sharded"])


def trainer_of(flat: allreduce.Topology, update: str = "replicated") -> MirroredTrainer:
    network = NumpyNetwork([4, 8, 3], seed=1, optimizer="momentum", lr=0.02)
    return MirroredTrainer(network, "auto", flat, update=update)


RUIN = Schedule(lambda step: 1.0 if step < 6 else 150.0)  # from the third epoch on


def fit(trainer: MirroredTrainer, *callbacks: Any, epochs: int = 4, **options: Any) -> History:
    return trainer.fit(X, Y, epochs, 20, validation_data=(X, Y), callbacks=callbacks, progress=False, **options)


@pytest.fixture
def folder(tmp_path: Path, world: MPI.Intracomm) -> Path:
    """Return rank 0's folder, on all ranks."""
    return world.bcast(tmp_path)


def test_the_best_weights_come_back(flat: allreduce.Topology, folder: Path) -> None:
    """The rates ruin the model from the third epoch on; the final model is that of the second epoch. Saving the models
    changes nothing, and a file holds the model of its epoch."""
    stopping, saving = EarlyStopping(patience=1, restore_best_weights=True), ModelCheckpoint(folder / "{epoch}.npz")
    with trainer_of(flat) as trainer:
        history = fit(trainer, stopping, saving, transforms=[RUIN])
        assert len(history) == 3
        measured = trainer.evaluate(X, Y)
        assert measured["loss"] == pytest.approx(history[1].validation["loss"], rel=1e-6)
        assert measured["loss"] < history[2].validation["loss"]
        restored = trainer.parameters_sha256()
        assert len(set(restored)) == 1
        assert trainer.replica.learning_rates == [0.02]
        assert sorted(path.name for path in folder.iterdir()) == ["1.npz", "2.npz", "3.npz"]
        trainer.load(str(folder / "1.npz"))
        assert trainer.evaluate(X, Y)["loss"] == pytest.approx(history[0].validation["loss"], rel=1e-6)
    with trainer_of(flat) as trainer:
        fit(trainer, epochs=2)
        assert trainer.parameters_sha256() == restored


class Gathers(trainers.callbacks.Callback):
    """A callback that communicates. seen: the numbers of all ranks, for each epoch."""

    collective = True

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.seen.append(self.trainer.group.values(self.trainer.group.rank, "Gathers"))


class RaisesOnOneRank(trainers.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if epoch == 2 and self.trainer.group.rank == SIZE - 1:
            raise ArithmeticError("of one rank's callback")


@UPDATES
def test_between_steps_that_raises_on_one_rank(update: str, flat: allreduce.Topology, world: MPI.Intracomm) -> None:
    """Also beside a callback that communicates there: all ranks raise the error."""

    class Raises(trainers.callbacks.Callback):
        def between_steps(self, epoch: int, batch: int) -> None:
            if batch == 1 and world.rank == SIZE - 1:
                raise ValueError("boo")

    with trainer_of(flat, update) as trainer, pytest.raises(Exception, match="boo"):
        fit(trainer, Raises(), trainers.callbacks.CheckDivergence(every=1))


def test_a_callback_gathers_values_also_if_a_callback_of_one_rank_fails(flat: allreduce.Topology) -> None:
    with trainer_of(flat) as trainer:
        gathers = Gathers()
        with pytest.raises(Exception, match="of one rank's callback"):
            fit(trainer, RaisesOnOneRank(), gathers)
        assert gathers.seen == 2 * [[*range(SIZE)]]


@pytest.mark.skipif(SIZE != 3, reason="once is enough")
@pytest.mark.parametrize("kind", ["sharded", "central", "sync", "spare"])
def test_other_trainers(kind: str, flat: allreduce.Topology, folder: Path, world: MPI.Intracomm) -> None:
    """A rate that ruins the model, the best weights restored, a file for each epoch, a trace: as with
    MirroredTrainer."""
    losses = []
    for make in (TRAINERS["replicated"], TRAINERS[kind]):
        callbacks = [
            EarlyStopping(patience=1, restore_best_weights=True),
            ModelCheckpoint(folder / "{epoch}.npz"),
            Timeline(folder / "trace.json"),
        ]
        with make(NumpyNetwork([4, 8, 3], seed=1, optimizer="momentum", lr=0.02), topology=flat) as trainer:
            history = fit(trainer, *callbacks, transforms=[RUIN])
            assert len(history) == 3
            restored = trainer.evaluate(X, Y)["loss"]
            trainer.load(str(folder / "1.npz"))
            losses.append([restored, trainer.evaluate(X, Y)["loss"], *(each.validation["loss"] for each in history)])
        world.Barrier()
        events = check_trace(json.loads((folder / "trace.json").read_text()), SIZE)
        assert {"data", "compute", "update"} < {event["cat"] for event in events}
        world.Barrier()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.skipif(SIZE == 1, reason="one rank is all ranks")
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "EarlyStopping"])
def test_what_all_ranks_must_have(kind: str, flat: allreduce.Topology, folder: Path) -> None:
    made = {
        "ModelCheckpoint": lambda: ModelCheckpoint(folder / "m.npz"),
        "EarlyStopping": lambda: EarlyStopping(restore_best_weights=True),
    }
    with trainer_of(flat) as trainer:
        before = trainer.parameters_sha256()
        with pytest.raises(DisagreementError, match=f"callbacks that communicate: .*{kind}"):
            fit(trainer, *([made[kind]()] if trainer.rank == 0 else []))
        assert trainer.parameters_sha256() == before
        assert list(folder.iterdir()) == []
