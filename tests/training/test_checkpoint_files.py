"""Checkpoint files: written ones can be read, damaged ones are skipped, old ones stay."""

import errno
import io
import json
import logging
import os
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import launch
from trainers.errors import CheckpointError, ModelFileError
from trainers.files import checkpoint, model_file
from trainers.files.checkpoint import Progress, Saved
from trainers.replicas.numpy.network import NumpyNetwork


def saved(total: int = 7, **progress: Any) -> Saved:
    network = NumpyNetwork([4, 3, 2], seed=total)
    local = [{"random": np.arange(3, dtype=np.uint8)}, {}]
    progress |= {"history": [{"epoch": 1}], "values": np.array([[0.5, 0.25]])}
    made = Progress(epoch=2, step=1, total=total, ranks=2, **progress)
    return Saved("NumpyNetwork", network.config, network.state(), made, local)


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
    given = saved(settings={"seed": 3})
    checkpoint.write(path, given)
    assert_same(checkpoint.read(path), given)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint-00000007.npz"]
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_it_is_a_model_file_that_loads_and_predicts_without_mpi(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 5)
    done = launch.child(
        "import sys\n"
        "sys.modules['mpi4py'] = None\n"
        "import numpy as np\n"
        "from trainers import NumpyNetwork\n"
        "from trainers.files import checkpoint\n"
        f"print(NumpyNetwork.load({path!r}).predict(np.ones((1, 4))).tolist())\n"
        f"print(checkpoint.newest({str(tmp_path)!r})[1].progress.total)\n"
    )
    expected = NumpyNetwork([4, 3, 2], seed=5).predict(np.ones((1, 4))).tolist()
    assert done.stdout.splitlines() == [str(expected), "5"], done.stderr


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
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            assert_same(checkpoint.read(str(path)), saved(3))
        except ModelFileError:
            refused += 1
    assert refused > len(content) / 7 / 2


def test_members_that_change_their_names_are_found(tmp_path: Path) -> None:
    """Every array is intact, but two of the same size have swapped names."""
    path = written(tmp_path, 3)[0]
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    first, second = "optimizer.first_moment.npy", "parameters.npy"
    members[first], members[second] = members[second], members[first]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
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
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        with archive.open("checkpoint.npy") as file:
            header = json.loads(str(np.lib.format.read_array(file)))
    del members["checkpoint.npy"]
    text = json.dumps({**header, **change})
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        model_file.put(archive, "checkpoint", np.array(text))
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


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"can't be written to .*No such file"):
        checkpoint.write(str(tmp_path / "gone" / "checkpoint-00000001.npz"), saved(1))


def test_what_a_killed_writer_left_is_cleaned_away(tmp_path: Path) -> None:
    """A process killed in the middle of a write leaves a temporary file, which is not a checkpoint."""
    written(tmp_path, 1)
    program = (
        "import os, signal, sys\n"
        "from trainers.files import checkpoint, model_file\n"
        "from trainers.files.checkpoint import read, write\n"
        f"folder = {str(tmp_path)!r}\n"
        "whole, put = read(checkpoint.paths(folder)[0]), model_file.put\n"
        "model_file.put = lambda archive, name, array: "
        "name != 'sizes' and put(archive, name, array) or name == 'sizes' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "write(checkpoint.path_of(folder, 2), whole)\n"
    )
    done = launch.child(program)
    assert done.returncode == -9, done.stderr
    assert len(list(tmp_path.iterdir())) == 2
    found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert_same(found[1], saved(1))
    (tmp_path / "mine.npz.12345678").touch()
    checkpoint.clean(str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint-00000001.npz", "mine.npz.12345678"]


def test_a_forked_child_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    """A DataLoader's worker, forked during a fit, may live longer than it."""
    with checkpoint.in_use(str(tmp_path)):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        with pytest.raises(CheckpointError, match="another running training"), checkpoint.in_use(str(tmp_path)):
            pass
    try:
        with checkpoint.in_use(str(tmp_path)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


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
