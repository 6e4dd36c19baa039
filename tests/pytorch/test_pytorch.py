"""MirroredOptimizer: tests that need no other rank, or a separate job."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JobRunner, in_one_job

ROOT = Path(__file__).resolve().parents[2]


def test_without_torch_the_extra_is_named() -> None:
    for module in ("trainers.pytorch", "trainers.replicas.pytorch"):
        code = f"import sys; sys.modules['torch'] = None; import {module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode
        assert 'pip install ".[torch]" in the checkout' in done.stderr


def test_a_rank_ends_early(mpirun: JobRunner, tmp_path: Path) -> None:
    """The other ranks learn where it ended, and the job ends with an error instead of hanging."""
    pytest.importorskip("torch")
    script = tmp_path / "loop.py"
    script.write_text(
        "import sys, torch\n"
        "from trainers.pytorch import MirroredOptimizer\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "for step in range(3 - optimizer.topology.rank):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    job = mpirun(2, [script], timeout=60)
    assert job.returncode
    assert "rank 1 has left: it has ended its program" in job.stderr
    assert "waits for it in averages gradients, after 2 steps and 2 averages, bucket 1 of 1 of" in job.stderr


INTERRUPTED = """
import os, signal, sys, threading, time, torch
from trainers.pytorch import Buckets, MirroredOptimizer
for overlap in (False, True):
    told = f"{sys.argv[1]}-{overlap}"
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = MirroredOptimizer(plain, model, buckets=Buckets(overlap))
    rank = optimizer.topology.rank
    def backward():
        (model.bias.sum() * (rank + 1)).backward()
    if rank == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            backward()
            print("not interrupted")
        except KeyboardInterrupt:
            open(told, "w").close()
    else:
        while not os.path.exists(told):  # so rank 0 waits for nothing but its Ctrl-C
            time.sleep(0.05)
        backward()
    optimizer.zero_grad()
    backward()
    optimizer.step()
    if rank == 0:
        print(model.bias.grad.tolist())
    optimizer.close()
"""


def test_ctrl_c_while_gradients_are_waited_for(mpirun: JobRunner, tmp_path: Path) -> None:
    """Ctrl-C leaves backward at once. A program that catches it can continue, because all calls that had begun are
    completed."""
    pytest.importorskip("torch")
    job = mpirun(2, ["-c", INTERRUPTED, tmp_path / "interrupted"], timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "[1.5, 1.5]\n" * 2


def test_two_optimizers_closed_in_different_order(mpirun: JobRunner, tmp_path: Path) -> None:
    """No silent hang: the time-out shows where each rank waits."""
    pytest.importorskip("torch")
    script = tmp_path / "close.py"
    script.write_text(
        "import torch\n"
        "from trainers.pytorch import MirroredOptimizer\n"
        "models = [torch.nn.Linear(3, 2) for _ in range(2)]\n"
        "made = [MirroredOptimizer(torch.optim.SGD(each.parameters(), lr=0.1), each) for each in models]\n"
        "for optimizer in made if made[0].topology.rank else reversed(made):\n"
        "    optimizer.close()\n"
    )
    job = mpirun(2, [script], timeout=100, env={"ALLREDUCE_TIMEOUT_SECONDS": "3"})
    assert job.returncode
    assert "closes the optimizer, after 0 steps and 0 averages of MirroredOptimizer" in job.stderr, job.stderr


def test_a_rank_drops_its_optimizer(mpirun: JobRunner, tmp_path: Path) -> None:
    """The other ranks get an error; tests/ranks/pytorch/test_life.py has one whose rank continues the training."""
    pytest.importorskip("torch")
    script = tmp_path / "drop.py"
    script.write_text(
        "import time, torch\n"
        "from trainers.pytorch import MirroredOptimizer\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "rank = optimizer.topology.rank\n"
        "def backward():\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "backward()\n"
        "optimizer.step()\n"
        "if rank == 1:\n"
        "    del optimizer\n"
        "    time.sleep(30)\n"
        "else:\n"
        "    backward()\n"
    )
    job = mpirun(2, [script], timeout=100, env={"ALLREDUCE_TIMEOUT_SECONDS": "8"})
    assert job.returncode
    assert "has not arrived" in job.stderr, job.stderr


def test_a_former_option_shows_the_new_form() -> None:
    pytest.importorskip("torch")
    from trainers.errors import ArgumentError
    from trainers.pytorch import Buckets, MirroredOptimizer

    old: Any = {"check_gradients": "skip"}
    with pytest.raises(
        TypeError, match=r"takes no check_gradients=.* any more; give checks=\[CheckGradients\(.skip.\)]"
    ):
        MirroredOptimizer(None, None, **old)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Buckets: overlap must be True, False or .auto., got 'maybe'"):
        Buckets("maybe")


def test_without_threads_gradients_are_reduced_after_backward(mpirun: JobRunner, tmp_path: Path) -> None:
    """If MPI was started without MPI_THREAD_MULTIPLE, a notice reports it once, and the training is right."""
    pytest.importorskip("torch")
    script = tmp_path / "loop.py"
    script.write_text(
        "import mpi4py\n"
        "mpi4py.rc.thread_level = 'serialized'\n"
        "import torch\n"
        "from trainers.pytorch import Buckets, MirroredOptimizer\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, buckets=Buckets(True))\n"
        "(model.bias.sum() * (optimizer.topology.rank + 1)).backward()\n"
        "optimizer.step()\n"
        "if optimizer.topology.rank == 0:\n"
        "    print(model.bias.grad.tolist(), optimizer.report().overlap)\n"
        "optimizer.close()\n"
    )
    job = mpirun(2, [script], timeout=60)
    assert job.returncode == 0, job.stderr
    assert "[1.5, 1.5] False" in job.stdout
    assert job.stderr.count("gradients are reduced after backward, not during it: ") == 1


@pytest.mark.expensive
@pytest.mark.jobs
def test_training_step_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    wrong = {
        "--models mlpp": "'mlpp' can't be given; did you mean 'mlp'? use all, or some of mlp, transformer, conv",
        "--json no/out.json": "does not exist; create it first",
        "--models embedding --ways fsdp": "has sparse gradients, which FSDP2 + gloo, FSDP2 + allreduce don't take",
    }
    short = ["--models", "conv", "--batch", "4", "--steps", "2", "--warmup", "1", "--verify", "3", "--json", "out.json"]
    ways = "--models conv --ways ddp,zero,fsdp --batch 4 --steps 1 --warmup 0 --verify 1 --no-memory --json ways.json"
    options = [
        *map(str.split, wrong),
        [*short, "--variants", "DDP + gloo; DDP + gloo, float16; replicated; replicated, int8; sharded"],
        ways.split(),
    ]
    lines = [("benchmarks.training_step", each, str(tmp_path)) for each in options]
    *refused, came, compared = in_one_job(2, lines, tmp_path, timeout=180)
    for told, ranks in zip(wrong.values(), refused, strict=True):
        assert [rank["code"] for rank in ranks] == [2, 2]
        assert "".join(rank["stderr"] for rank in ranks).count(told) == 1
    assert all(not rank["code"] for rank in came + compared), (came, compared)
    result = json.loads((tmp_path / "out.json").read_text())["results"][0]
    assert result["times"]["replicated"]["median_ms"] > 0
    assert result["times"]["replicated"]["samples_per_second"] > 0
    assert result["differences"]["replicated"]["bits_equal"]
    assert result["differences"]["sharded"]["largest"] <= 1e-6
    result = json.loads((tmp_path / "ways.json").read_text())["results"][0]
    for way in ("DDP", "ZeRO-1", "FSDP2"):
        assert result["times"][f"{way} + allreduce"]["faster_than_gloo"] > 0
        assert result["differences"].get(f"{way} + allreduce", {"largest": 1})["largest"] <= 1e-6
    assert {"added_to_ddp_ms", "added_of_all_reduce_alone"} <= result["times"]["DDP + allreduce"].keys()
