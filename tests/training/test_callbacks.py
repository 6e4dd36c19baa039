"""The callbacks, with the events of a simulated fit."""

import math
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import event_files
from trainers import MirroredTrainer, NumpyNetwork
from trainers.callbacks import (
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    Prometheus,
    TensorBoard,
    Timeline,
)
from trainers.errors import ArgumentError
from trainers.watching.callback import Callback, Callbacks


class Trainer:
    """The parts of a trainer that callbacks use, on one rank."""

    def __init__(self, rank: int = 0, size: int = 1, rates: Sequence[float] = (0.1,)) -> None:
        self.rank, self.size, self.stop_training, self.goes_on = rank, size, False, False
        self.replica = SimpleNamespace(learning_rates=list(rates))
        self.group = SimpleNamespace(enter=lambda call: None, on_one=lambda action: rank or action())
        self.saved: list[str] = []
        self.save = self.saved.append
        self.epochs = 0


def fit(callbacks: Any, epochs: list[dict[str, Any]], trainer: Trainer | None = None, steps: int = 4) -> Trainer:
    """A fit in which each epoch measures the given logs, until a callback stops it."""
    trainer = trainer or Trainer()
    every = Callbacks(callbacks if isinstance(callbacks, list) else [callbacks], trainer, len(epochs), steps)
    try:
        every.train_begin()
        for number, logs in enumerate(epochs):
            every.epoch_begin(number)
            for batch in range(steps):
                every.batch_begin(batch)
                every.batch_end(batch, {"loss": float(batch)})
            every.epoch_end(number, logs)
            trainer.epochs = number + 1
            if trainer.stop_training:
                break
        every.train_end({})
    finally:
        every.release()
    return trainer


@pytest.mark.parametrize("of", ["instance", "class"])
@pytest.mark.parametrize("event", ["on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"])
def test_batch_events_of_an_instance_and_of_a_class(event: str, of: str) -> None:
    """Also by the other name of Keras."""
    told: list[int] = []
    if of == "class":
        callback = type("Told", (Callback,), {event: lambda self, batch, logs: told.append(batch)})()
    else:
        callback = Callback()
        setattr(callback, event, lambda batch, logs: told.append(batch))
    fit(callback, losses(1.0))
    assert told == [0, 1, 2, 3]


def losses(*values: float, name: str = "val_loss") -> list[dict[str, Any]]:
    return [{name: value} for value in values]


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"),
    [
        ({}, (3, 2, 2, 1), 3),  # Keras: patience 0 stops at the first epoch without improvement
        ({"patience": 2}, (3, 2, 2, 2, 1), 4),
        ({"patience": 2}, (3, 2, 2, 1, 1, 1, 1), 6),
        ({"min_delta": 0.5}, (3, 2.6, 1), 2),
        ({"min_delta": -0.5}, (3, 2.6, 1), 2),  # Keras takes its size
        ({"mode": "max"}, (1, 2, 3, 2, 4), 4),
        ({"baseline": 1.0, "patience": 2}, (3, 2, 1.5, 0.5), 4),  # improves, but is never below the baseline in time
        ({"baseline": 1.0, "patience": 2}, (3, 2, 2, 2, 2), 3),
        ({"start_from_epoch": 3}, (1, 2, 2, 2, 2), 5),
        ({}, (math.nan, 2, 1, 1), 4),
        ({"patience": 1}, (math.nan, 2, 1, 0.5), 4),
        *(({"monitor": name}, (1, 2, 3, 2, 4), 4) for name in ("accuracy", "val_accuracy", "val_auc", "acc")),
        ({"monitor": "error"}, (3, 2, 1, 2, 0), 4),
    ],
)
def test_early_stopping(arguments: dict[str, Any], values: tuple[float, ...], epochs: int) -> None:
    measured = losses(*values, name=arguments.get("monitor", "val_loss"))
    assert fit(EarlyStopping(**arguments), measured).epochs == epochs


def test_early_stopping_begins_anew() -> None:
    callback = EarlyStopping(patience=1)
    for _ in range(2):
        assert fit(callback, losses(3, 2, 2, 1)).epochs == 3
        assert callback.best == 2


@pytest.mark.parametrize("kind", [EarlyStopping, lambda **rest: ModelCheckpoint("m", save_best_only=True, **rest)])
def test_what_is_not_measured(kind: Any) -> None:
    with pytest.raises(ArgumentError, match="'val_loss' is not measured here; pass validation_data to fit; the"):
        fit(kind(), losses(1, name="loss"))
    with pytest.raises(ArgumentError, match="'mse' is not measured here; the logs have loss"):
        fit(kind(monitor="mse"), losses(1, name="loss"))


def test_model_checkpoint(tmp_path: Path) -> None:
    epochs = losses(3, 2, 2.5, 1)
    assert fit(ModelCheckpoint(tmp_path / "m.npz"), epochs).saved == [str(tmp_path / "m.npz")] * 4
    named = fit(ModelCheckpoint(tmp_path / "{epoch:02d}-{val_loss:.1f}.npz"), epochs).saved
    assert [Path(path).name for path in named] == ["01-3.0.npz", "02-2.0.npz", "03-2.5.npz", "04-1.0.npz"]
    best = fit(ModelCheckpoint(tmp_path / "{epoch}.npz", save_best_only=True), epochs).saved
    assert [Path(path).name for path in best] == ["1.npz", "2.npz", "4.npz"]
    better = ModelCheckpoint(tmp_path / "{epoch}.npz", save_best_only=True, initial_value_threshold=2.2)
    assert [Path(path).name for path in fit(better, epochs).saved] == ["2.npz", "4.npz"]
    with pytest.raises(ArgumentError, match=r"\(KeyError\('mae'\)\); the known names are epoch, val_loss"):
        fit(ModelCheckpoint(tmp_path / "{mae}.npz"), epochs)
    trainer = Trainer()
    with pytest.raises(ArgumentError, match="not a writable folder"):
        fit(ModelCheckpoint(tmp_path / "missing" / "{epoch}.npz"), epochs, trainer)
    assert not trainer.epochs


def test_learning_rates_of_replicas() -> None:
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch import TorchReplica

    module = torch.nn.Linear(2, 2)
    groups = [{"params": [module.weight], "lr": 0.25}, {"params": [module.bias]}]
    replica = TorchReplica(module, torch.nn.MSELoss(), torch.optim.Adam(groups, lr=torch.tensor(0.5)))
    assert replica.learning_rates == [0.25, 0.5]
    replica.learning_rates = [0.125, 0.25]
    assert replica.learning_rates == [0.125, 0.25]
    assert isinstance(replica.optimizer.param_groups[1]["lr"], torch.Tensor)


def test_csv_logger(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    fit(CSVLogger(path), [{"loss": 0.5, "accuracy": 0.25}, {"loss": 0.25}])
    assert path.read_text() == "epoch,accuracy,loss\n0,0.25,0.5\n1,NA,0.25\n"
    fit(CSVLogger(path, append=True), [{"loss": 0.125, "accuracy": 1.0, "other": 3}])
    assert path.read_text().splitlines()[2:] == ["1,NA,0.25", "0,1.0,0.125"]
    fit(CSVLogger(path, separator=";"), [{"loss": 0.5}])
    assert path.read_text() == "epoch;loss\n0;0.5\n"
    fit(CSVLogger(tmp_path / "other.csv"), losses(1), Trainer(rank=1, size=2))
    assert not (tmp_path / "other.csv").exists()
    path.write_text("epoch,loss\n0,0.5\n1,0.2")  # a line that a killed writer left is not gone on with
    fit(CSVLogger(path, append=True), [{"loss": 0.25}])
    assert path.read_text() == "epoch,loss\n0,0.5\n1,0.2\n0,0.25\n"
    for wrong, text in ((tmp_path, ""), (tmp_path / "missing" / "log.csv", ""), ("/dev/full", ": No space left")):
        with pytest.raises(ArgumentError, match="can't be written" + text):
            fit(CSVLogger(wrong), losses(1))


def test_files_of_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Timeline records its own fit, not the last of several. Its file and checkpoints are where the fit began."""

    class Away(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            monkeypatch.chdir("/")

    def train(*callbacks: Callback, **more: Any) -> None:
        x, y = np.ones((9, 4), "float32"), np.arange(9) % 2
        with MirroredTrainer(NumpyNetwork([4, 3, 2]), "ring") as trainer:
            trainer.fit(x, y, 2, 3, callbacks=callbacks, progress=False, **more)

    monkeypatch.chdir(tmp_path)
    train(Timeline("trace.json"), Away(), checkpoint="run")
    assert (tmp_path / "trace.json").exists()
    assert len([*(tmp_path / "run").glob("*.npz")]) == 2
    with pytest.raises(ArgumentError, match=r"other: this fit is already recorded in .*/one; use one Timeline"):
        train(Timeline(tmp_path / "one"), Timeline(tmp_path / "other"))


def test_tensorboard(tmp_path: Path) -> None:
    """The files are parsed by a separate reader, checksums included. A second fit adds a file of its own; other ranks
    write nothing."""
    pytest.importorskip("tensorboardX")
    epochs = [
        {"loss": 0.5, "val_loss": 1.5, "samples_per_second": 1000.0, "staleness": (3, 0, 1), "seconds": 1},
        {"loss": 0.25, "val_loss": 1.25, "samples_per_second": 2000.0, "staleness": (), "seconds": 1},
    ]
    fit(TensorBoard(tmp_path, update_freq=3), epochs, Trainer(rates=(0.125,)))
    trained, validated = event_files.values(tmp_path / "train"), event_files.values(tmp_path / "validation")
    assert validated == [("epoch_loss", 0, 1.5), ("epoch_loss", 1, 1.25)]
    for tag, values in (
        ("epoch_loss", [(0, 0.5), (1, 0.25)]),
        ("epoch_learning_rate", [(0, 0.125), (1, 0.125)]),
        ("epoch_samples_per_second", [(0, 1000), (1, 2000)]),
        ("epoch_staleness", []),  # counts are no number
        ("batch_loss", [(3, 2), (6, 1)]),  # losses are batch numbers
    ):
        assert [each[1:] for each in trained if each.tag == tag] == values
    fit(TensorBoard(tmp_path), losses(1, name="loss"))
    assert len(list((tmp_path / "train").iterdir())) == 2
    assert len(list((tmp_path / "validation").iterdir())) == 1
    fit(TensorBoard(tmp_path / "other"), losses(1), Trainer(rank=1, size=2))
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="train can't be written"):
        fit(TensorBoard(tmp_path / "file"), losses(1))


def test_prometheus_serves_a_fit() -> None:
    """Rank 0 serves; after a failure its successor; the port is free again after the fit."""
    pytest.importorskip("prometheus_client")
    metrics, seen = Prometheus(port=0), []

    class Look(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.trainer.size = 2
            metrics.on_ranks_change()  # a rank has failed
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
                seen.extend(line for line in answer.read().decode().splitlines() if not line.startswith("#"))

    measured = {"loss": 0.5, "accuracy": 0.75, "samples_per_second": 100.0, "communication_share": 0.25}
    fit([metrics, Look()], [measured], Trainer(size=3))
    values = dict(line.removeprefix("allreduce_training_").rsplit(" ", 1) for line in seen)
    assert float(values["process_resident_memory_bytes"]) > 1e6
    values.pop("steps_created", None)
    assert {name: float(value) for name, value in values.items() if not name.startswith("process_")} == {
        "steps_total": 4,
        "epoch": 1,
        "loss": 0.5,
        "rows_per_second": 100,
        "communication_share": 0.25,
        'metric{name="accuracy"}': 0.75,
        "ranks": 2,
    }
    follower = Prometheus(port=metrics.port)
    follower.set_trainer(Trainer(rank=1, size=2))
    follower.on_train_begin()
    follower.trainer.rank = 0  # type: ignore[misc]
    follower.on_ranks_change()
    with pytest.raises(ArgumentError, match=f"can't listen at 127.0.0.1:{follower.port}"):
        fit(Prometheus(port=follower.port), [])
    follower.set_trainer(None)


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [("prometheus_client", Prometheus, "prometheus"), ("tensorboardX", TensorBoard, "tensorboard")],
)
def test_a_package_is_missing(package: str, make: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArgumentError, match=rf'pip install "\.\[{extra}\]" in the checkout'):
        fit(make(), losses(1))
