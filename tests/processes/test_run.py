"""trainers.run: a function on the ranks of a new job, from a script."""

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from trainers.cli import run
from trainers.errors import ArgumentError, RunError

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.jobs

SCRIPT = """
import os, sys, threading, time
import trainers
from trainers.errors import ArgumentError, RunError

offset = 100  # of the script: it travels with the function

def train(factor, shift=0):
    import allreduce, numpy as np
    with allreduce.create("ring") as reduce:
        array = np.full(3, reduce.rank + 1.0)
        reduce(array, "sum")
        print(f"rank {reduce.rank} prints")
        print(f"stdin of rank {reduce.rank}: {sys.stdin.read()!r}", file=sys.stderr)
        return offset + factor * reduce.rank + shift, array

def fails(bad):
    import allreduce
    reduce = allreduce.create("ring")
    if reduce.rank == bad:
        raise ValueError("on purpose")
    import numpy as np
    reduce(np.ones(3), "sum")

print(trainers.run(train, (10,), {"shift": 1}, ranks=3))
lock = threading.Lock()
def leaves():
    import allreduce
    if allreduce.Topology().rank == 1:
        sys.exit(0)

stops = (
    (fails, {"args": (1,), "ranks": 2}), (lambda: os._exit(7), {"ranks": 1}), (leaves, {"ranks": 2, "timeout": 40}),
    (lambda: time.sleep(99), {"ranks": 1, "timeout": 1}),
)
for function, options in stops:
    try:
        trainers.run(function, **options)
    except RunError as error:
        print("RUN ERROR", error.rank, str(error).splitlines()[0], "in fails" in error.traceback)
for function, options in ((lambda: lock, {}), (3, {}), (train, {"ranks": 0}), (train, {"launcher": "nompi"})):
    try:
        trainers.run(function, **options)
    except ArgumentError as error:
        print("ARGUMENT ERROR", error)
assert "mpi4py.MPI" not in sys.modules  # the caller starts no MPI
"""


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_results_output_and_errors(mpirun: JobRunner, tmp_path: Path, mpi: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = mpirun(0, ["script.py"], mpi=mpi, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    if "needs cloudpickle" in job.stderr:
        lacking(f"the environment of {mpi} has no cloudpickle")
    assert job.returncode == 0, job.stdout + job.stderr
    array = "array([6., 6., 6.])"
    results, *others = [line for line in job.stdout.splitlines() if line != "rank 0 prints"]
    assert results == f"[(101, {array}), (111, {array}), (121, {array})]"
    assert "rank 1 prints" not in job.stdout
    assert "ValueError: on purpose" in job.stderr
    assert others[0] == "RUN ERROR 1 rank 1 of 2 raised ValueError: on purpose True"
    assert others[1].startswith("RUN ERROR None the job of 1 ranks ended without results (exit code 7)")
    assert others.pop(3).startswith("RUN ERROR None the job of 1 ranks did not end within the timeout")
    assert others.pop(2) == "RUN ERROR 1 rank 1 of 2 raised SystemExit: 0 False"  # the other rank would wait for it
    words = ("can't be sent to the ranks (TypeError: ", "takes a function, got int", "ranks=0: ", "no such program")
    assert len(others) == 2 + len(words), others
    for line, word in zip(others[2:], words, strict=True):
        assert line.startswith("ARGUMENT ERROR "), line
        assert word in line
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]  # nothing is left


INTERRUPTED = """
import time, trainers
def train():
    import allreduce
    allreduce.Topology()
    print("begun")
    time.sleep(100)
trainers.run(train, ranks=2)
"""


def comes(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_caller_ends_all_ranks(tmp_path: Path, signum: signal.Signals) -> None:
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        with launch.started([sys.executable, "-c", INTERRUPTED], out, err, {"TMPDIR": str(tmp_path)}) as process:
            comes(lambda: "begun" in (tmp_path / "out").read_text())
            mark = Path(f"/proc/{process.pid}/environ").read_bytes().split(launch.MARK.encode() + b"=")[1][:32].decode()
            assert len(launch.marked(mark)) > 2
            os.kill(process.pid, signum)
            assert process.wait(30) != 0
            comes(lambda: signum == signal.SIGINT or not launch.marked(mark))
            assert launch.marked(mark) == []
        assert signum != signal.SIGINT or "KeyboardInterrupt" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": "5"}, "timeout='5': give a number of seconds"),
        ({"timeout": 0}, "timeout=0: give a number of seconds"),
        ({"launcher": ""}, "launcher='': there is no such program"),
        ({"launcher": "mpirun '"}, "No closing quotation"),
    ],
)
def test_bad_options_start_no_job(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        run.run(print, ranks=1, **options)


class HalfError(Exception):  # its pickle holds one argument, and it takes two
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def test_a_result_that_can_not_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / run.RESULTS).write_bytes(pickle.dumps([pickle.dumps(5), pickle.dumps(HalfError(1, 2))]))
    with pytest.raises(RunError, match="rank 1's result can't be loaded here \\(TypeError") as raised:
        run._results(tmp_path, 2, 0, "")
    assert raised.value.rank == 1


def test_an_error_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's error may end this rank while it writes its own."""
    write = Path.write_bytes

    def killed(path: Path, content: bytes) -> int:
        write(path, content[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        run._bring(str(tmp_path), run.ERROR.format(1), b'{"rank": 1}')
    with pytest.raises(RunError, match="exit code 1"):
        run._results(tmp_path, 2, 1, "")


def test_settings_of_mpi_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_MCA_btl", "PRTE_MCA_plm_ssh_args", "PMIX_RANK", "PRTE_LAUNCHED"):
        monkeypatch.setenv(name, "1")
    found = run._environment(None, 1)
    assert "OMPI_MCA_btl" in found
    assert "PRTE_MCA_plm_ssh_args" in found
    assert not {"PMIX_RANK", "PRTE_LAUNCHED"} & {*found}


def test_cloudpickle_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ArgumentError, match=r'pip install "\.\[run\]" in the checkout'):
        run.run(print)
