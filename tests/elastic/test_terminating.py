"""SIGTERM on one rank: all ranks stop after the same step, the checkpoint is written, the job ends with 143."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from tests import launch
from tests.conftest import JobRunner
from trainers.recovery.terminating import Terminating

PROGRAM = """
import os, signal, sys, threading, time
import allreduce
from trainers import Terminating
from trainers.cli.main import main
topology = allreduce.Topology()
steps = 0
with Terminating(topology.world) as sigterm:  # a loop of the user's own
    while not sigterm.asked():
        steps += 1
        if steps == 5 and topology.rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
print("stopped after", steps, "steps", flush=True)
def soon():
    while not any(name.startswith("checkpoint-") for name in os.listdir(sys.argv[1])):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
os.makedirs(sys.argv[1], exist_ok=True)
if topology.rank == 1:
    threading.Thread(target=soon, daemon=True).start()
code = main(["--data", "digits", "--epochs", "100000", "--checkpoint", sys.argv[1], *sys.argv[2:]])
print("came to the end", code)
"""


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_one_rank_is_told(mpirun: JobRunner, tmp_path: Path, mpi: str) -> None:
    folder = tmp_path / "checkpoints"
    job = mpirun(3, ["-c", PROGRAM, folder, "--checkpoint-every", "20 steps"], mpi=mpi, timeout=60)
    text = job.stdout + job.stderr
    assert job.returncode == 128 + signal.SIGTERM, text
    assert job.stdout.count("stopped after") == 3, text  # MPICH joins lines
    assert text.count("SIGTERM: the training has been stopped; its newest checkpoint is in") == 1, text
    assert "Traceback" not in text
    assert "came to the end" not in text
    assert list(folder.glob("checkpoint-*.npz"))


@pytest.fixture
def default() -> Iterator[None]:
    """SIGTERM has its default action."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default")
def test_the_handler_of_the_program_stays() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    with Terminating(MPI.COMM_SELF) as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not sigterm.asked()
    assert came == [signal.SIGTERM]


@pytest.mark.usefixtures("default")
def test_blocks_in_each_other() -> None:
    """A signal that no block has reported is not lost; after the outermost block, SIGTERM has its default action
    again."""
    with Terminating(MPI.COMM_SELF) as outer:
        with Terminating(MPI.COMM_SELF) as inner:
            assert not inner.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.here
        assert outer.asked()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with Terminating(MPI.COMM_SELF) as later:
        assert not later.asked()


@pytest.mark.usefixtures("default")
def test_forked_children_end() -> None:
    """A Pool that a data set uses during a fit ends its processes by SIGTERM, and waits for them."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    try:
        with Terminating(MPI.COMM_SELF) as sigterm:
            child.start()
            child.terminate()
            child.join(10)
            assert child.exitcode == -signal.SIGTERM
            assert not sigterm.asked()
    finally:
        child.kill()


@pytest.mark.usefixtures("default")
def test_an_error_that_the_program_catches() -> None:
    """The next block reports a SIGTERM on which the previous one has not acted; the block after that does not."""
    with contextlib.suppress(ZeroDivisionError), Terminating(MPI.COMM_SELF):
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with Terminating(MPI.COMM_SELF) as later:
        assert later.asked()
    with Terminating(MPI.COMM_SELF) as last:
        assert not last.asked()
