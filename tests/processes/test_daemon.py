"""Ranks end when the launcher's daemon that started them is gone; no other process ends."""

import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from allreduce.process import daemon, proc, variables
from tests import launch
from tests.conftest import lacking

# The daemon is killed when all ranks are in their own code, or when all but one wait for that one.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import allreduce
from allreduce.process import daemon, proc, variables

reduce = allreduce.create("ring")
reduce(np.ones(3), "sum")
started_by, name = daemon.find()
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
reduce(np.ones(3), "sum")
if reduce.rank == 0:
    time.sleep(1)
    os.kill(started_by, signal.SIGKILL)
if sys.argv[2] == "call" and reduce.rank:
    reduce(np.ones(3), "sum")
until = time.monotonic() + 500
while time.monotonic() < until:
    sum(range(1000))
"""
ALONE = """
import os, sys, time
import allreduce

shell = os.getppid()
allreduce.Topology()
open(sys.argv[1], "w").close()
while os.getppid() == shell:
    time.sleep(0.1)
time.sleep(3)
open(sys.argv[2], "w").close()
"""
WRAPPERS = {"plain": [], "timeout": ["timeout", "500"], "shell": ["bash", "-c", '"$@"; true', "-"]}


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("mpi", "options", "wrapper", "where"),
    [
        ("openmpi", [], "shell", "call"),
        ("openmpi", ["--with-ft", "ulfm"], "timeout", "own code"),
        ("mpich", [], "plain", "call"),
    ],
)
def test_ranks_end_with_their_daemon(mpi: str, options: list[str], wrapper: str, where: str, tmp_path: Path) -> None:
    try:
        bin_folder = launch.environment(mpi) / "bin"
    except launch.MissingEnvironmentError as error:
        lacking(error)
        return
    script, ranks, mark = tmp_path / "program.py", tmp_path / "ranks", uuid.uuid4().hex
    script.write_text(PROGRAM)
    ranks.mkdir()
    name, *more = launch.LAUNCHERS[mpi]
    command = [str(bin_folder / name), *more, *options, "-n", "2", *WRAPPERS[wrapper], str(bin_folder / "python")]
    with tempfile.TemporaryDirectory(prefix="job", ignore_cleanup_errors=True) as temporary:
        job = subprocess.Popen(
            [*command, script, ranks, where], env={**launch.variables(mark), "TMPDIR": temporary},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            job.wait(120)
            numbers = [int(path.name) for path in ranks.iterdir()]
            assert len(numbers) == 2
            until = time.monotonic() + 60
            while left := [number for number in numbers if number in launch.marked(mark)]:
                assert time.monotonic() < until, f"{left} of {numbers} live on"
                time.sleep(0.1)
        finally:
            launch.end(job, mark)


def test_a_program_without_a_launcher_outlives_its_shell(tmp_path: Path) -> None:
    script, began, done = (tmp_path / name for name in ("program.py", "began", "done"))
    script.write_text(ALONE)
    python = launch.environment("openmpi") / "bin" / "python"
    shell = subprocess.Popen(
        ["bash", "-c", f"nohup {python} {script} {began} {done} & wait"], env=launch.variables("none"),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    appears(began)
    shell.send_signal(signal.SIGKILL)
    shell.wait()
    appears(done)


def appears(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.1)


def test_a_daemon_is_looked_for_only_where_a_launcher_has_told_who_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    above = [(30, "timeout"), (20, "hydra_pmi_proxy"), (10, "slurmstepd")]
    monkeypatch.setattr(proc, "ancestors", lambda: above)
    for name in variables.PROCESS:
        monkeypatch.delenv(name, raising=False)
    assert daemon.find() is None  # a program that a job of Slurm runs by itself
    monkeypatch.setenv("PMI_RANK", "0")
    assert daemon.find() == (20, "hydra_pmi_proxy")
    above[:] = [(30, "bash"), (20, "systemd")]
    assert daemon.find() is None


def test_ancestors() -> None:
    numbers = [number for number, _ in proc.ancestors()]
    assert numbers[:1] == ([] if os.getppid() == 1 else [os.getppid()])
