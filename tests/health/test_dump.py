"""The files in which all ranks write where they wait, their stacks and their last calls; and SIGUSR1."""

import re
from pathlib import Path

import pytest

from allreduce.health import dump
from tests import launch
from tests.conftest import JobRunner

PROGRAM = """
import os, signal, threading, time
import numpy as np
import allreduce
topology = allreduce.Topology()
reduce = allreduce.create("ring", topology)
grads = reduce.allocate(50_000)
reduce(grads)
def looks_for_data():
    time.sleep(3)
if topology.rank == 0:
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
if topology.rank == 1:
    looks_for_data()
reduce(grads)
topology.close()
print("came to the end", flush=True)
"""


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_a_stall_and_a_signal(mpirun: JobRunner, tmp_path: Path, mpi: str) -> None:
    """Also of a rank that computes; afterwards the job continues."""
    folder = tmp_path / "dumps"
    limits = {"ALLREDUCE_STALL_SECONDS": "1", "ALLREDUCE_DUMP": str(folder)}
    job = mpirun(3, ["-c", PROGRAM], mpi=mpi, timeout=60, env=limits)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("came to the end") == 3
    assert "rank 0 has waited" in job.stderr
    assert "200000 bytes (call number " in job.stderr
    assert str(folder / "dump-rank-*.txt") in job.stderr
    assert "in looks_for_data" in (folder / "dump-rank-1.txt").read_text()
    first = (folder / "dump-rank-0.txt").read_text()
    assert "has waited " in first.splitlines()[1]
    assert first.rindex("in _compare") < first.rindex("The last calls of rank 0:")  # below the stacks
    waiting = job.stderr.partition("rank 0 of 3: process ")[2]
    assert waiting.partition("has waited ")[2].partition(" s in ")[2].startswith("all_reduce: length 50000"), job.stderr
    assert "in _compare" in job.stderr  # the stacks that SIGUSR1 prints


def test_many_signals_while_threads_run() -> None:
    """Stacks are read while no thread runs. No file stays open, of which Python would warn at the end."""
    code = (
        "import subprocess, threading, time, warnings, allreduce\n"
        "warnings.simplefilter('always')\n"
        "allreduce.Topology()\n"
        "def deeper(depth):\n"
        "    return depth and deeper(depth - 1) + len([each for each in range(3)])\n"
        "end = time.monotonic() + 1\n"
        "def run():\n"
        "    while time.monotonic() < end: deeper(300)\n"
        "for _ in range(3): threading.Thread(target=run).start()\n"
        "sender = subprocess.Popen(['sh', '-c', 'while kill -USR1 $PPID; do sleep 0.01; done'])\n"
        "run()\n"
        "sender.kill(); sender.wait()\n"
    )
    done = launch.child(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "in deeper" in done.stderr
    assert "ResourceWarning" not in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ("signal.signal(signal.SIGUSR1, lambda *_: print('mine'))", "", "mine\n"),  # a handler of the program stays
        ("", "topology.close(); MPI.Finalize()", ""),  # it still prints then, and calls no MPI function
    ],
)
def test_a_signal(before: str, after: str, printed: str) -> None:
    code = (
        f"import os, signal, time\nfrom mpi4py import MPI\n{before}\nimport allreduce\ntopology = allreduce.Topology()"
    )
    done = launch.child(f"{code}\n{after}\nos.kill(os.getpid(), signal.SIGUSR1)\ntime.sleep(0.5)\nprint('goes on')")
    assert (done.stdout, done.returncode) == (f"{printed}goes on\n", 0), done.stderr
    assert ("rank 0 of 1: process " in done.stderr) == (not printed)
    assert ("most recent call first" in done.stderr) == (not printed)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the dumps of this rank, none of which was written recently."""
    monkeypatch.setenv(dump.DUMP, str(tmp_path))
    monkeypatch.setattr(dump, "_files", {})
    monkeypatch.setattr(dump, "_dumped", [float("-inf")])
    return tmp_path / "dump-rank-0.txt"


def test_a_full_disk(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The waiting rank continues to wait, and gets one warning."""
    dump._files[str(file.parent)] = open("/dev/full", "a", 1)  # noqa: SIM115
    for _ in range(2):
        dump.write("waits", last=True)
    assert caplog.text.count("no dump can be written there: ") == 1


def test_no_link_is_followed(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other users may write to the folder."""
    file.symlink_to(tmp_path / "elsewhere")
    dump.write("waits")
    assert "no dump can be written there: " in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_does_not_grow_for_ever(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        dump.write("waits", last=True)
    several = file.stat().st_size
    monkeypatch.setattr(dump, "MOST_BYTES", several - 1)
    dump.write("waits again", last=True)
    assert 0 < file.stat().st_size < several
    assert "waits again" in file.read_text()


CALLS = """
import sys, time
import numpy as np
import allreduce
reduce = allreduce.create("ring")
grads = np.ones(1000, "float32")
for step in range(300):
    reduce(grads, "sum")
if reduce.rank == 1:
    if sys.argv[1] == "raises":
        raise ValueError("on purpose")
    if sys.argv[1] == "is late":
        time.sleep(20)
    grads = np.ones(999, "float32")
reduce(grads, "sum")
"""


@pytest.mark.parametrize(("mpi", "action"), [("mpich", "is late"), ("openmpi", "raises"), ("openmpi", "differs")])
def test_the_last_calls_show_which_rank_differs(mpirun: JobRunner, tmp_path: Path, mpi: str, action: str) -> None:
    """All ranks write their last 256 calls when a wait times out or the job is aborted."""
    env = {"ALLREDUCE_DUMP": str(tmp_path), "ALLREDUCE_TIMEOUT_SECONDS": "2" if action == "is late" else "60"}
    job = mpirun(3, ["-c", CALLS, action], mpi=mpi, env=env)
    assert job.returncode != 0
    first, late, last = ((tmp_path / f"dump-rank-{rank}.txt").read_text() for rank in range(3))
    (call,) = set(re.findall("did not end: (call 30[1-9] of 0-2#1/[0-9]+: all_reduce: )length 1000", first))
    assert f"did not end: {call}length 1000, dtype float32" in last
    assert (f"did not end: {call}length 999" in late) == (action == "differs")
    assert (call in late) == (action == "differs")
    lines = late.partition("The last calls of rank 1:\n")[2].partition("\n\n")[0].splitlines()
    assert dump.KEPT <= len(lines) <= dump.KEPT + 2  # the calls that run are listed too
    assert ("ValueError: on purpose" in late.splitlines()[0]) == (action == "raises")
