"""fit with checkpoints on several ranks: a resumed training has the results of an uninterrupted one."""

import csv
import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import allreduce
from tests import event_files
from tests.ranks.training import fits
from tests.ranks.training.fits import FEATURES, ROWS, SIZE, STRATEGIES, Once, X, Y, fail, on_last, stop
from trainers import CentralStorageTrainer, Checkpoint, Loader, MirroredTrainer, NumpyNetwork
from trainers import callbacks as shipped
from trainers.callbacks import (
    CheckDivergence,
    CheckGradients,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    Prometheus,
    TensorBoard,
    Timeline,
)
from trainers.errors import CheckpointError
from trainers.files import checkpoint as files
from trainers.trainer import Trainer
from trainers.watching.callback import Callback
from trainers.watching.history import History
from trainers.watching.meter import Meter

EPOCHS, BATCH = 4, 12  # five steps in an epoch, the last one short


def network(**options: Any) -> NumpyNetwork:
    return fits.network(**{"lr": 0.01, **options})


TRAINERS = STRATEGIES | {"central": partial(CentralStorageTrainer, storage=SIZE - 1)}
every_strategy = pytest.mark.parametrize("strategy", ["replicated", "sharded", "central", *["sync"] * (SIZE > 1)])

ONCE = pytest.mark.skipif(SIZE != 3, reason="once is enough")


def killed_before(epoch: int, step: int) -> list[Callback]:
    """Return the callbacks of a fit whose last rank fails before a step."""
    return on_last("on_train_batch_begin", fail, epoch, step)


def fitted(trainer: Trainer, **options: Any) -> History:
    options = {"epochs": EPOCHS, "validation_data": (X, Y), "progress": False, **options}
    return trainer.fit(X, Y, batch_size=BATCH, **options)


def killed(strategy: str, topology: allreduce.Topology, folder: Path, every: str, when: tuple[int, int]) -> None:
    with (
        TRAINERS[strategy](network(seed=2), topology=topology) as trainer,
        pytest.raises(OSError, match="disk"),
    ):
        fitted(trainer, checkpoint=Checkpoint(str(folder), every), callbacks=killed_before(*when), resume=True)


def bits(history: History) -> list[list[float]]:
    """Return all values of a history that are not times."""
    return [history.column(name) for name in ("epoch", "loss", "accuracy", "validation_loss", "validation_accuracy")]


@every_strategy
def test_the_end_of_an_epoch_that_was_resumed_in_its_middle_can_be_read(
    strategy: str, flat: allreduce.Topology, folder: Path
) -> None:
    """Sharded optimizer state is complete in a checkpoint, and equal to the state that `save` writes."""
    killed(strategy, flat, folder, "3 steps", (0, 3))
    with TRAINERS[strategy](network(seed=5), topology=flat) as trainer:
        epoch = fitted(trainer, epochs=2, checkpoint=str(folder), resume=True)[0]
        trainer.save(str(folder / "model.npz"))
    assert epoch.samples_per_second == pytest.approx(ROWS / epoch.seconds)
    found = [files.read(path) for path in files.paths(str(folder))]
    assert [str(each.progress) for each in found] == ["the end of epoch 2", "the end of epoch 1", "epoch 1, step 4"]
    assert [len(each.progress.values) for each in found] == [0, 0, 3]
    assert found[0].progress.ranks == flat.size
    flat.agree([], "rank 0 has written")
    with np.load(str(folder / "model.npz")) as model:
        assert "optimizer.second_moment" in model.files
        for name in model.files[1:]:
            assert np.array_equal(model[name], found[0].state[name]), name


def test_a_stop_is_written_and_a_longer_training_goes_on(flat: allreduce.Topology, folder: Path) -> None:
    stopping = [Once("on_train_batch_end", stop, epoch=0, batch=2)] if flat.rank == 0 else []
    with MirroredTrainer(network(), "ring", flat) as trainer:
        assert len(fitted(trainer, checkpoint=str(folder), callbacks=stopping)) == 1
        assert [os.path.basename(path) for path in files.paths(str(folder))] == ["checkpoint-00000004.npz"]
        each_step = Checkpoint(str(folder), "0.000001 s", keep=2)  # by rank 0's clock
        assert len(fitted(trainer, checkpoint=each_step, resume=True)) == EPOCHS
        if flat.rank == 0:
            assert sorted(os.listdir(folder)) == ["checkpoint-00000019.npz", "checkpoint-00000020.npz"]
            middle = files.read(str(folder / "checkpoint-00000019.npz"))
            assert (str(middle.progress), middle.progress.values.shape) == ("epoch 4, step 5", (4, 3))
        before = trainer.parameters_sha256()
        assert len(fitted(trainer, checkpoint=str(folder), resume=True)) == EPOCHS  # there is nothing left to do
        assert trainer.parameters_sha256() == before


def test_a_rank_that_joins_after_the_last_step_writes_the_end_too(
    flat: allreduce.Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback stops the fit at the last step. The meter of a rank that joins then has no steps of the epoch."""
    means = Meter.means

    def forget(meter: Meter) -> dict[str, float]:
        found = means(meter)
        meter.on_epoch_begin(0)
        return found

    monkeypatch.setattr(Meter, "means", forget)
    with MirroredTrainer(network(), "ring", flat) as trainer:
        fitted(trainer, checkpoint=str(folder), callbacks=[Once("on_train_batch_end", stop, 0, 3)])
    assert [os.path.basename(path) for path in files.paths(str(folder))] == ["checkpoint-00000005.npz"]


def changes() -> list[tuple[dict[str, Any], str]]:
    """Arguments of fit, or "model", another network, that a checkpoint does not fit, and parts of the errors."""
    x, other = r"x float32\[50, 6\] #", ".*, and this one has "
    labels = (Y + (np.arange(ROWS) == ROWS - 1)) % 3
    return [
        ({"resume": False}, "holds checkpoints of another training, the newest of the end of"),
        ({"seed": 5}, "of a training with seed=0, and this one has seed=5"),
        ({"batch_size": 13}, "of a training with batch_size=12, and this one has batch_size=13"),
        ({"x": X[:40], "y": Y[:40]}, "with rows=50, and this one has rows=40"),
        ({"checkpoint": "/dev/null/run"}, "can't be written to /dev/null/run: Not a directory"),
        ({"model": NumpyNetwork([FEATURES, 9, 3])}, r"layer 1 weights of shape \(6, 8\) where .* of shape \(6, 9\)"),
        ({"model": NumpyNetwork([FEATURES, 8, 3, 3])}, "it has no more parameters where this one has layer 3 weig"),
        ({"model": network(activation="tanh")}, "with activation='relu', and this one has activation='tanh'"),
        ({"model": network(optimizer="sgd")}, "the saved model is another one: optimizer"),
        ({"x": X[::-1].copy(), "y": Y[::-1].copy()}, f"other data, {x}{other}{x}(.|\n)*same_data=False"),
        ({"x": X[:, ::-1].copy()}, f"other data, {x}"),
        ({"y": labels}, rf"y int64\[50\] #{other}.* y int64\[50\] #"),
        ({"y": Y.astype(np.int32)}, rf"y int64\[50\] #{other}.* y int32\[50\] #"),
        ({"x": fits.Rows(X.astype(np.float64), Y), "y": None}, rf"{x}{other}Rows of 50 rows, x float64\[6\]"),
    ]


@ONCE
def test_what_can_not_go_on_is_refused_on_all_ranks(flat: allreduce.Topology, folder: Path) -> None:
    options = {"x": X, "y": Y, "epochs": 2, "batch_size": BATCH, "checkpoint": str(folder), "resume": True}
    with MirroredTrainer(network(), "ring", flat) as trainer:
        trainer.fit(**options | {"epochs": 1}, progress=False)
    listed = sorted(os.listdir(folder))
    for change, words in changes():
        given = options | change
        with MirroredTrainer(given.pop("model", network()), "ring", flat) as trainer:
            before = trainer.parameters_sha256()
            with pytest.raises(CheckpointError, match=words) as caught:
                trainer.fit(**given, progress=False)
            assert caught.value.ranks == tuple(range(flat.size))
            assert trainer.parameters_sha256() == before
            assert sorted(os.listdir(folder)) == listed


def test_other_data_are_taken_when_that_is_asked_for(flat: allreduce.Topology, folder: Path) -> None:
    def fit(x: np.ndarray, epochs: int, checkpoint: Any) -> int:
        with MirroredTrainer(network(), "ring", flat) as trainer:
            return len(trainer.fit(x, Y, epochs, BATCH, checkpoint=checkpoint, resume=True, progress=False))

    assert fit(X, 1, str(folder)) == 1
    with pytest.raises(CheckpointError, match="same_data=False"):
        fit(X + 1, 2, str(folder))
    assert fit(X + 1, 2, Checkpoint(str(folder), same_data=False)) == 2
    assert fit(X + 1, 3, str(folder)) == 3  # the newest is of these now


class NoisyRows(fits.Rows):
    """Adds new random numbers to x at each access, as an augmentation does."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return x + np.float32(random.gauss(0, 1) + np.random.rand()), y


def test_random_numbers_go_on(flat: allreduce.Topology, folder: Path) -> None:
    """Those of Python's and NumPy's own generators. And a fit with checkpoints has the bits of a fit without."""

    def trained(**options: Any) -> list[str]:
        random.seed(flat.rank)
        np.random.seed(flat.rank)
        with MirroredTrainer(network(), "ring", flat) as trainer:
            trainer.fit(Loader(NoisyRows(X, Y), prefetch=False), None, EPOCHS, BATCH, progress=False, **options)
            return trainer.parameters_sha256()

    expected = trained()
    assert trained(checkpoint=str(folder / "whole")) == expected
    parts = str(folder / "parts")
    with pytest.raises(OSError, match="disk"):
        trained(checkpoint=Checkpoint(parts, "2 steps"), callbacks=killed_before(1, 3))
    assert trained(checkpoint=parts, resume=True) == expected


def test_what_the_writing_meets_is_raised_on_all_ranks(
    flat: allreduce.Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the thread writes the second checkpoint; the first checkpoint stays."""
    really, times = files.model_file.put, [0]

    def put(archive: Any, name: str, array: np.ndarray) -> None:
        times[0] += name == "model"
        if times[0] == 2 and name == "sizes":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(archive, name, array)

    monkeypatch.setattr(files.model_file, "put", put)
    words = r"can't be written to .*: No space left on device"
    with MirroredTrainer(network(), "ring", flat) as trainer, pytest.raises(CheckpointError, match=words) as caught:
        fitted(trainer, checkpoint=Checkpoint(str(folder), "2 steps"))
    assert caught.value.ranks == tuple(range(flat.size))
    flat.agree([], "rank 0 has written")
    assert os.listdir(folder) == ["checkpoint-00000002.npz"]
    monkeypatch.undo()
    with MirroredTrainer(network(), "ring", flat) as trainer:
        assert len(fitted(trainer, checkpoint=str(folder), resume=True)) == EPOCHS


def every_callback(folder: Path) -> list[Callback]:
    """Return one of each shipped callback; they write to this folder."""
    return [
        CSVLogger(folder / "log.csv", append=True),
        CheckDivergence(every=2),
        CheckGradients("skip"),
        EarlyStopping("loss", mode="max", patience=3, restore_best_weights=True),  # of the first epoch
        ModelCheckpoint(folder / "{epoch}.npz", "loss", save_best_only=True),
        Prometheus(port=0),
        TensorBoard(folder / "logs", update_freq=2),
        Timeline(folder / "trace.json"),
    ]


@pytest.mark.skipif(SIZE == 1, reason="takes long, and one rank does a part of what two do")
@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_every_shipped_callback_goes_on(
    strategy: str, flat: allreduce.Topology, folder: Path, world: MPI.Intracomm
) -> None:
    """All in one fit: their files, and their effect on the training, are those of an uninterrupted fit."""
    pytest.importorskip("tensorboardX")  # the environment of MPICH has none
    assert {type(each).__name__ for each in every_callback(folder)} == {*shipped.__all__} - {"Callback"}

    def fit(where: str, *others: Callback, **options: Any) -> tuple[Any, ...]:
        written = folder.parent / where
        if world.rank == 0:
            written.mkdir(exist_ok=True)
        world.Barrier()
        with TRAINERS[strategy](network(), topology=flat) as trainer:
            history = fitted(trainer, callbacks=[*every_callback(written), *others], **options)
            result = bits(history), trainer.parameters_sha256(), trainer.replica.learning_rates
        world.Barrier()
        models = sorted(path.name for path in written.glob("*.npz"))
        with open(written / "log.csv") as file:
            lines = [(line["epoch"], line["loss"], line["val_accuracy"]) for line in csv.DictReader(file)]
        of_batches = {
            (value.tag, value.step, value.value)
            for value in event_files.values(written / "logs" / "train")
            if value.tag.startswith("batch_")
        }
        assert json.loads((written / "trace.json").read_text())["traceEvents"]
        return *result, models, lines, of_batches

    expected = fit("whole")
    assert [line[0] for line in expected[-2]] == ["0", "1", "2", "3"]
    with pytest.raises(OSError, match="disk"):
        fit("again", *killed_before(2, 4), checkpoint=Checkpoint(str(folder), "3 steps"))
    assert fit("again", checkpoint=str(folder), resume=True) == expected


@ONCE
@pytest.mark.parametrize("steps", [5, 6])
def test_where_older_versions_stopped_after_the_last_step_of_an_epoch(
    steps: int, flat: allreduce.Topology, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After all five steps of an epoch, its end is next. A checkpoint of six steps of five is skipped."""
    with MirroredTrainer(network(), "ring", flat) as trainer:
        whole, expected = fitted(trainer), trainer.parameters_sha256()
    with MirroredTrainer(network(), "ring", flat) as trainer:
        fitted(trainer, epochs=2, checkpoint=Checkpoint(str(folder), "1 step"))
    if flat.rank == 0:
        path, saved = files.path_of(str(folder), 10), files.read(files.path_of(str(folder), 9))
        values = saved.progress.values
        values = np.concatenate([values, *[values[-1:]] * (steps - 4)])
        progress = replace(saved.progress, step=steps, total=10, values=values)
        files.write(path, replace(files.read(path), progress=progress))
    with MirroredTrainer(network(seed=5), "ring", flat) as trainer, caplog.at_level("WARNING", "trainers"):
        resumed = fitted(trainer, checkpoint=str(folder), resume=True)
        assert trainer.parameters_sha256() == expected
    assert resumed.column("epoch") == [1, 2, 3, 4]
    assert resumed.column("validation_loss") == whole.column("validation_loss")
    passed_over = "checkpoint-00000010.npz is damaged: step 6 of 5; trying the one before it"
    assert (passed_over in caplog.text) == (steps == 6 and flat.rank == 0)


@ONCE
@pytest.mark.parametrize("strategy", ["async", "spare"])
def test_trainers_whose_ranks_go_their_own_way_go_on_from_the_end_of_an_epoch(
    strategy: str, flat: allreduce.Topology, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed("replicated", flat, folder, "2 steps", (1, 3))  # after 4, 6 and 8 steps, all in the middle of an epoch
    with (
        TRAINERS[strategy](network(), topology=flat) as trainer,
        pytest.raises(CheckpointError, match="of the middle of an epoch"),
    ):
        fitted(trainer, checkpoint=str(folder), resume=True)
    if flat.rank == 0:
        shutil.rmtree(folder)
    flat.agree([], "rank 0 has removed them")
    killed("replicated", flat, folder, "5 steps", (1, 3))
    killed("replicated", flat, folder, "2 steps", (1, 3))
    with TRAINERS[strategy](network(seed=7), topology=flat) as trainer, caplog.at_level("WARNING", "trainers"):
        history = fitted(trainer, checkpoint=Checkpoint(str(folder), "0.000001 s"), resume=True)
        scores, parameters = trainer.evaluate(X, Y), trainer.parameters_sha256()
    assert ("of the middle of an epoch" in caplog.text) == (flat.rank == 0)
    assert history.column("epoch") == [1, 2, 3, 4]
    newest = files.newest(str(folder))
    assert newest is not None
    assert (newest[1].progress.epoch, newest[1].progress.step) == (4, 0)
    assert scores["loss"] == pytest.approx(history[-1].validation["loss"])
    assert len(set(parameters)) == 1


@pytest.mark.skipif(SIZE not in (2, 3), reason="2 and 3 ranks are enough")
@pytest.mark.parametrize("what", ["a checkpoint", "a digest"])
def test_what_one_rank_can_not_give_is_raised_on_all(
    what: str, flat: allreduce.Topology, world: MPI.Intracomm, folder: Path
) -> None:
    """Rank 0's description of its model, or the last rank's parameters: no rank waits for that rank for ever."""

    def fails() -> Any:
        raise RuntimeError("this model has lost its way")

    class Breaks(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if world.rank == 0:
                self.trainer.replica.optimizer.config = fails

    with MirroredTrainer(network(), "ring", flat) as trainer:
        call: Callable[[], Any] = trainer.parameters_sha256
        if what == "a checkpoint":
            options: Any = {"checkpoint": str(folder), "callbacks": [Breaks()], "progress": False}
            call = partial(trainer.fit, X, Y, EPOCHS, BATCH, **options)
        elif world.rank == SIZE - 1:
            trainer.replica.others = fails  # type: ignore[method-assign]
        with pytest.raises(Exception, match="this model has lost its way"):
            call()
