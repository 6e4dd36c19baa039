"""Checkpoints on one rank: the user's options, the thread that writes, copies, random states."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers import Checkpoint, MirroredTrainer, NumpyNetwork
from trainers.cli.options import parse
from trainers.errors import ArgumentError, CheckpointError
from trainers.files import checkpoint, model_file
from trainers.files.checkpoint import EVENTS, Progress
from trainers.files.values import encode
from trainers.fit import checkpointing
from trainers.fit.checkpointing import Saver, period
from trainers.replica import snapshot_of
from trainers.watching.callback import Callback
from trainers.watching.history import Epoch, History

PERIODS = {
    "epoch": (1, "epochs"), "3 epochs": (3, "epochs"), "step": (1, "steps"), "500 steps": (500, "steps"),
    "30 seconds": (30, "seconds"), "0.5s": (0.5, "seconds"), " 10 Minutes ": (600, "seconds"), "2h": (7200, "seconds"),
    "minute": (60, "seconds"),
}  # fmt: skip


@pytest.mark.parametrize("every", PERIODS)
def test_every(every: str) -> None:
    assert period(every) == PERIODS[every]


@pytest.mark.parametrize("every", ["", "500", 500, "0 steps", "0.5 epochs", "-1 s", "0 s", "fortnight", None])
def test_every_that_makes_no_sense(every: Any) -> None:
    with pytest.raises(ArgumentError, match='use "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes"'):
        Checkpoint("run", every)


def test_a_checkpoint_is_written_while_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), checkpoint.write

    def slow(path: str, saved: checkpoint.Saved) -> None:
        assert go_on.wait(10)
        write(path, saved)

    class GoesOn(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:  # after the checkpoint
                go_on.set()

    monkeypatch.setattr(checkpoint, "write", slow)
    x, y = np.ones((8, 4), np.float32), np.zeros(8, int)
    with MirroredTrainer(NumpyNetwork([4, 2])) as trainer:
        trainer.fit(x, y, 1, 2, callbacks=[GoesOn()], checkpoint=Checkpoint(tmp_path, "2 steps"), progress=False)
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == [
        "checkpoint-00000002.npz",
        "checkpoint-00000004.npz",
    ]


def test_after_a_failure_a_checkpoint_is_due_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savers, opened = [], Saver.open
    monkeypatch.setattr(Saver, "open", lambda saver: opened((savers.append(saver), saver)[1]))

    class Fails(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                savers[0].rejoin()

    x, y = np.ones((8, 4), np.float32), np.zeros(8, int)
    with MirroredTrainer(NumpyNetwork([4, 2])) as trainer:
        trainer.fit(x, y, 1, 2, callbacks=[Fails()], checkpoint=Checkpoint(tmp_path, "9 epochs"), progress=False)
    assert [path.name for path in sorted(tmp_path.glob("*.npz"))] == [
        "checkpoint-00000003.npz",
        "checkpoint-00000004.npz",
    ]


def test_a_progress_is_entries_of_a_state() -> None:
    history = [{"epoch": 1, "loss": np.float32(0.5), "staleness": np.array([1, 2])}]
    values = np.array([[0.25, np.nan]], np.float32)
    progress = Progress(1, 3, 8, history=history, values=values, stage=EVENTS, logs={"loss": 0.5}, stops=[True, False])
    state = {"parameters": np.ones(2), **progress.pack()}
    found = Progress.taken_from(state)
    assert list(state) == ["parameters"]
    assert found == replace(progress, history=[{"epoch": 1, "loss": 0.5, "staleness": [1, 2]}])
    assert found.values.tobytes() == values.tobytes()
    assert Progress(1, 3).place < found.place < Progress(2).place


def test_a_snapshot_does_not_change_and_its_memory_is_used_again() -> None:
    network, memory = NumpyNetwork([4, 3, 2]), {}
    first = snapshot_of(network, memory)
    place, before = first["parameters"].ctypes.data, network.parameters.copy()
    network.parameters += 1
    assert np.array_equal(first["parameters"], before)
    again = snapshot_of(network, memory, without=["sizes"])
    assert set(first) - set(again) == {"sizes"}
    assert again["parameters"].ctypes.data == place
    assert np.array_equal(again["parameters"], network.parameters)


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1)  # it keeps another number
    np.random.normal()
    state = model_file.unpack(model_file.pack(checkpointing.random_state()))
    drawn = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    checkpointing.load_random_state(state)
    assert [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()] == drawn


def test_an_epoch_comes_back_from_its_dictionary() -> None:
    for others in ({}, {"staleness": (7, 2), "dropped": 1}):
        epoch = Epoch(3, 0.5, {"accuracy": 0.75}, 1.5, 100.0, 0.25, {"loss": 0.625}, **others)
        assert Epoch.of_dict(json.loads(json.dumps(epoch.as_dict()))) == epoch


def test_options_that_need_a_folder() -> None:
    for given in (["--resume"], ["--checkpoint-every", "5 steps"]):
        with pytest.raises(ArgumentError, match="needs --checkpoint DIR"):
            parse(given, shown=False)
    with pytest.raises(ArgumentError, match=r"--checkpoint-every: every='5' is not a period: use \"epoch\""):
        parse(["--checkpoint", "run", "--checkpoint-every", "5"], shown=False)
    assert parse(["--checkpoint", "run", "--resume"], shown=False).checkpoint == "run"
    with pytest.raises(ArgumentError, match="--other-data needs --resume"):
        parse(["--checkpoint", "run", "--other-data"], shown=False)


def fitted(folder: str, epochs: int, *callbacks: Callback, **options: Any) -> History:
    x = np.random.default_rng(3).normal(size=(20, 4)).astype("float32")
    with MirroredTrainer(NumpyNetwork([4, 3, 2], seed=1), "ring") as trainer:
        options = {"progress": False, "callbacks": callbacks, **options}
        return trainer.fit(x, x[:, :2].argmax(1), epochs, 10, checkpoint=folder, **options)


def test_a_training_that_changes_its_folder_writes_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            monkeypatch.chdir("/")

    monkeypatch.chdir(tmp_path)
    fitted("run", 3, Away())
    assert len(checkpoint.paths(str(tmp_path / "run"))) == 3


LARGE = (3, (1 << 40,) * 625, None), np.random.get_state()  # numbers that Python's generator does not take


@pytest.mark.parametrize("damage", [{}, {"random": np.zeros(3)}, {"random": encode(LARGE)}])
def test_what_a_rank_can_not_go_on_with_is_named(damage: dict[str, np.ndarray], tmp_path: Path) -> None:
    fitted(str(tmp_path), 2)
    path = checkpoint.paths(str(tmp_path))[0]
    whole = checkpoint.read(path)
    checkpoint.write(path, replace(whole, local=[{**whole.local[0], **damage} if damage else {}]))
    with pytest.raises(CheckpointError, match="is damaged, or of another model: a rank can't load its own"):
        fitted(str(tmp_path), 3, resume=True)


def test_two_trainings_do_not_write_to_one_folder_at_once(tmp_path: Path) -> None:
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])
    refused = []

    class Intrudes(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with MirroredTrainer(NumpyNetwork([2, 2])) as other, pytest.raises(CheckpointError) as raised:
                other.fit(x, y, epochs=1, checkpoint=str(tmp_path), resume=True, progress=False)
            refused.append(str(raised.value))

    with MirroredTrainer(NumpyNetwork([2, 2])) as trainer:
        trainer.fit(x, y, epochs=1, checkpoint=str(tmp_path), callbacks=[Intrudes()], progress=False)
        assert refused == [
            f"another running training writes its checkpoints to {tmp_path}; give each a folder of its own"
        ]
        trainer.fit(x, y, epochs=2, checkpoint=str(tmp_path), resume=True, progress=False)  # free again
