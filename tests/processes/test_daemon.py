"""Ranks end when the launcher's daemon that started them is gone; no other process ends."""

import os
import time
from pathlib import Path
from subprocess import DEVNULL

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
    time.sleep(0.3)
    os.kill(started_by, signal.SIGKILL)
if sys.argv[2] == "call" and reduce.rank:
    reduce(np.ones(3), "sum")
time.sleep(500)
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
    name, *more = launch.LAUNCHERS[mpi]
    command = [str(bin_folder / name), *more, *options, "-n", "2", *WRAPPERS[wrapper], str(bin_folder / "python")]
    with launch.started([*command, "-c", PROGRAM, str(tmp_path), where], DEVNULL, DEVNULL) as job:
        job.wait(120)
        numbers = [path.name for path in tmp_path.iterdir()]
        assert len(numbers) == 2
        until = time.monotonic() + 60
        while left := [number for number in numbers if lives(number)]:
            assert time.monotonic() < until, f"{left} of {numbers} live on"
            time.sleep(0.1)


def lives(number: str) -> bool:
    state = proc.stat(int(number))
    return state is not None and state.state != "Z"


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
    monkeypatch.undo()
    numbers = [number for number, _ in proc.ancestors()]
    assert numbers[:1] == ([] if os.getppid() == 1 else [os.getppid()])
