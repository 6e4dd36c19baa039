"""MirroredOptimizer: tests that need no other rank, or a separate job."""

import json
from pathlib import Path

import pytest

from tests.conftest import JobRunner, in_one_job

HEAD = """
import time
import tests.without_dynamo
import torch
from allreduce import Topology
from allreduce.errors import CollectiveTimeoutError
from trainers.pytorch import MirroredOptimizer

def make(topology=None):
    model = torch.nn.Linear(3, 2)
    return model, MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, topology=topology)
"""
# Programs in which a rank would wait for ever, by seconds to a time-out and what the error says.
HANGS = {
    "two optimizers are closed in different order, and then a rank ends early": (
        """
made = [make(Topology(timeout=3))[1] for _ in range(2)]
try:
    for optimizer in made if made[0].topology.rank else reversed(made):
        optimizer.close()
except CollectiveTimeoutError as error:
    print("closed:", error, flush=True)
model, optimizer = make()
for step in range(3 - optimizer.topology.rank):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
""",
        "100",
        [
            "closes the optimizer, after 0 steps and 0 averages of MirroredOptimizer",
            "rank 1 has left: it has ended its program",
            "waits for it in averages gradients, after 2 steps and 2 averages, bucket 1 of 1 of",
        ],
    ),
    # tests/ranks/pytorch/test_life.py has one whose rank continues the training
    "a rank drops its optimizer": (
        """
model, optimizer = make()
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
if optimizer.topology.rank == 1:
    del optimizer
    time.sleep(30)
else:
    model(torch.ones(2, 3)).sum().backward()
""",
        "8",
        ["has not arrived"],
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_job_ends_with_an_error_instead_of_hanging(name: str, mpirun: JobRunner) -> None:
    """The other ranks learn where each rank is."""
    pytest.importorskip("torch")
    program, seconds, words = HANGS[name]
    job = mpirun(2, ["-c", HEAD + program], timeout=60, env={"ALLREDUCE_TIMEOUT_SECONDS": seconds})
    assert job.returncode
    for each in words:
        assert each in job.stdout + job.stderr, job.stderr


def test_an_option_of_buckets_is_checked() -> None:
    pytest.importorskip("torch")
    from trainers.errors import ArgumentError
    from trainers.pytorch import Buckets

    with pytest.raises(ArgumentError, match=r"Buckets: overlap must be True, False or .auto., got 'maybe'"):
        Buckets("maybe")


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
