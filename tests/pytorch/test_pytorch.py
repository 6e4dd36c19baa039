"""MirroredOptimizer: tests that need no other rank, or a separate job."""

import json
from pathlib import Path

import pytest

from tests.conftest import JobRunner, in_one_job

HANGS = """
import gc
import tests.without_dynamo
import torch
from allreduce import Topology
from allreduce.errors import CollectiveTimeoutError
from trainers.pytorch import MirroredOptimizer

def make(topology=None):
    model = torch.nn.Linear(3, 2)
    return model, MirroredOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, topology=topology)

def times_out(name, call):
    try:
        call()
    except CollectiveTimeoutError as error:
        print(f"{name}: {error}", flush=True)

made = [make(Topology(timeout=3))[1] for _ in range(2)]
rank = made[0].topology.rank
times_out("closed", lambda: [optimizer.close() for optimizer in (made if rank else reversed(made))])

model, optimizer = make(Topology(timeout=4))  # no topology of the optimizers before
if rank == 1:
    del optimizer
    gc.collect()
else:
    times_out("dropped", lambda: model(torch.ones(2, 3)).sum().backward())

model, optimizer = make()
for step in range(3 - optimizer.topology.rank):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


def test_the_job_ends_with_an_error_instead_of_hanging(mpirun: JobRunner) -> None:
    """Optimizers are closed in different order; one is dropped on a rank; and a rank ends early. The other ranks learn
    where each rank is. tests/ranks/pytorch/test_errors.py has ranks that continue the training."""
    pytest.importorskip("torch")
    job = mpirun(2, ["-c", HANGS], timeout=120)
    assert job.returncode
    for words in (
        "closes the optimizer, after 0 steps and 0 averages of MirroredOptimizer",
        "dropped: ",
        "has not arrived",
        "rank 1 has left: it has ended its program",
        "waits for it in averages gradients, after 2 steps and 2 averages, bucket 1 of 1 of",
    ):
        assert words in job.stdout + job.stderr, job.stdout + job.stderr


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
