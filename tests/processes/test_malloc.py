"""The handling of freed memory by malloc, measured by the page faults of a training step."""

import os
import subprocess

import pytest

from tests import launch

STEPS = """
import resource
import numpy as np
from torch import nn, optim, set_num_threads
from trainers import MirroredTrainer
from trainers.replicas.pytorch import TorchReplica

set_num_threads(1)
wide = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
module = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), *wide, nn.Linear(2048, 10))
trainer = MirroredTrainer(TorchReplica(module, nn.CrossEntropyLoss(), optim.SGD(module.parameters(), lr=0.01)), "ring")
x, y = np.ones((80, 784), np.float32), np.zeros(80, np.int64)
trainer.fit(x, y, 1, 10, progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
trainer.fit(x, y, 1, 10, progress=False)
print("FAULTS", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8)
trainer.close()
"""
LOOP = """
import resource
import torch
from torch import distributed, nn
import allreduce.torch_backend

torch.set_num_threads(1)
distributed.init_process_group("allreduce")
wide = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), *wide, nn.Linear(2048, 10)))
for step in range(16):
    if step == 8:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    model(torch.ones(10, 784)).sum().backward()
print("FAULTS", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8)
distributed.destroy_process_group()
"""


def python(program: str, environment: dict[str, str]) -> str:
    """Return the output of a program in a separate process."""
    command = [str(launch.environment("openmpi") / "bin" / "python"), "-c", program]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env = {**inherited, "PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("program", [STEPS, LOOP], ids=["fit", "DDP"])
def test_freed_memory_is_kept(program: str) -> None:
    """Every step frees gradients of 40 MiB; a malloc that returns them to the system causes 10,000 page faults in the
    next."""
    pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    assert float(python(program, {}).split("FAULTS")[1]) < 2500  # those of the fit itself


@pytest.mark.parametrize(
    ("environment", "kept"), [({}, True), ({"ALLREDUCE_MALLOC": "default"}, False), ({"MALLOC_ARENA_MAX": "2"}, False)]
)
def test_settings_of_the_users_own_are_left_alone(environment: dict[str, str], kept: bool) -> None:
    assert python("from allreduce.process import malloc; print(malloc.keep_freed_memory())", environment) == f"{kept}\n"
