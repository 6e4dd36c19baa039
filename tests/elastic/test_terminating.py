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


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    """SIGTERM has its default action."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


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


def test_the_handler_of_the_program_stays() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    with Terminating(MPI.COMM_SELF) as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not sigterm.asked()
    assert came == [signal.SIGTERM]


def test_a_signal_is_reported_once() -> None:
    """A signal that no block has reported is not lost: the block around it reports it, or after an error the next one.
    After the outermost block, SIGTERM has its default action again."""
    with Terminating(MPI.COMM_SELF) as outer:
        with Terminating(MPI.COMM_SELF) as inner:
            assert not inner.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.here
        assert outer.asked()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with contextlib.suppress(ZeroDivisionError), Terminating(MPI.COMM_SELF) as later:
        assert not later.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for reported in (True, False):
        with Terminating(MPI.COMM_SELF) as later:
            assert later.asked() == reported


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
