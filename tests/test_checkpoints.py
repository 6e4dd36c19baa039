"""Checkpoints without ranks: what a user says of them, the thread that writes, copies, random numbers."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers import Checkpoint, NumpyNetwork, random_state
from trainers.checkpoints import period
from trainers.errors import ArgumentError, CheckpointError
from trainers.files import npz
from trainers.options import parse
from trainers.watching.history import Epoch
from trainers.writer import Writer

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
    with pytest.raises(ArgumentError, match='say it as "epoch", "5 epochs", "500 steps", "30 seconds", "10 minutes"'):
        Checkpoint("run", every)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"mode": "best"}, {"best": None}, {"folder": ""}])
def test_other_arguments_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Checkpoint"):
        Checkpoint(**{"folder": "run", **options})


def test_the_best_is_the_lowest_loss_and_the_highest_of_others() -> None:
    lowest = {
        name: Checkpoint(Path("run"), best=name).lowest_is_best for name in ("loss", "validation_loss", "accuracy")
    }
    assert lowest == {"loss": True, "validation_loss": True, "accuracy": False}
    assert Checkpoint("run", best="accuracy", mode="min").lowest_is_best


def test_the_writer_works_beside_and_hands_over_errors() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go_on.wait(10)
        done.append(1)

    def fail() -> None:
        raise CheckpointError("the disk is full")

    writer = Writer()
    writer.start(work)
    assert begun.wait(10)
    assert done == []
    writer.check()
    go_on.set()
    writer.start(fail)  # after the one before
    assert done == [1]
    with pytest.raises(CheckpointError, match="full"):
        writer.wait()
    writer.wait()


def test_a_snapshot_does_not_change_and_its_memory_is_used_again() -> None:
    network, memory = NumpyNetwork([4, 3, 2]), {}
    first = network.snapshot(memory)
    place, before = first["parameters"].ctypes.data, network.parameters.copy()
    network.parameters += 1
    assert np.array_equal(first["parameters"], before)
    again = network.snapshot(memory, without=["sizes"])
    assert set(first) - set(again) == {"sizes"}
    assert again["parameters"].ctypes.data == place
    assert np.array_equal(again["parameters"], network.parameters)


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1)  # it keeps another number
    np.random.normal()
    state = npz.unpacked(npz.packed(random_state.take()))
    drawn = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    random_state.load(state)
    assert [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()] == drawn


def test_an_epoch_comes_back_from_its_dictionary() -> None:
    for others in ({}, {"staleness": (7, 2), "dropped": 1}):
        epoch = Epoch(3, 0.5, {"accuracy": 0.75}, 1.5, 100.0, 0.25, {"loss": 0.625}, **others)
        assert Epoch.of_dict(json.loads(json.dumps(epoch.as_dict()))) == epoch


def test_torch_snapshots_are_states(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from trainers.replicas.pytorch import TorchReplica

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).to(
        torch.bfloat16
    )
    replica = TorchReplica(module, torch.nn.CrossEntropyLoss(), torch.optim.Adam(module.parameters()))
    memory: dict[str, np.ndarray] = {}
    for _ in range(2):
        state, copy = replica.state(), replica.snapshot(memory)
        assert list(state) == list(copy)
        for name, array in state.items():
            assert array.dtype == copy[name].dtype
            assert np.array_equal(array, copy[name]), name
        replica.gradients(np.ones((5, 4), "float32"), np.arange(5) % 3, 1.0)
        replica.update()
    assert replica.shapes()["0.weight"] == (6, 4)


def test_options_that_need_a_folder() -> None:
    for given in (["--resume"], ["--checkpoint-every", "5 steps"]):
        with pytest.raises(ArgumentError, match="needs the folder of the checkpoints: --checkpoint DIR"):
            parse(given, shown=False)
    with pytest.raises(ArgumentError, match=r"--checkpoint-every: every='5' makes no sense: say it as \"epoch\""):
        parse(["--checkpoint", "run", "--checkpoint-every", "5"], shown=False)
    assert parse(["--checkpoint", "run", "--resume"], shown=False).checkpoint == "run"
