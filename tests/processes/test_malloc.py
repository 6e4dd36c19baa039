"""The handling of freed memory by malloc, measured by the page faults of a training step."""

import subprocess

import pytest

from tests import launch

# Every step frees gradients of 40 MiB; a malloc that returns them to the system causes 10,000 page faults in the next.
PROGRAM = """
import resource, sys
import numpy as np
import torch
from torch import distributed, nn

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.set_num_threads(1)
wide = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
module = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), *wide, nn.Linear(2048, 10))
if sys.argv[1] == "fit":
    from trainers import MirroredTrainer
    from trainers.replicas.pytorch import TorchReplica
    replica = TorchReplica(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.01))
    trainer = MirroredTrainer(replica, "ring")
    x, y = np.ones((40, 784), np.float32), np.zeros(40, np.int64)
    steps = lambda: trainer.fit(x, y, 1, 10, progress=False)
else:
    import allreduce.torch_backend
    distributed.init_process_group("allreduce")
    model = nn.parallel.DistributedDataParallel(module)
    def steps():
        for _ in range(4):
            model.zero_grad()
            model(torch.ones(10, 784)).sum().backward()
steps()
before = faults()
steps()
print("FAULTS", (faults() - before) / 4)
trainer.close() if sys.argv[1] == "fit" else distributed.destroy_process_group()
"""


def python(program: str, *arguments: str, **environment: str) -> str:
    """Return the output of a program in a separate process."""
    command = [str(launch.environment("openmpi") / "bin" / "python"), "-c", program, *arguments]
    inherited = {name: value for name, value in launch.variables("").items() if not name.startswith("MALLOC_")}
    env = {**inherited, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("way", ["fit", "DDP"])
def test_freed_memory_is_kept(way: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    assert float(python(PROGRAM, way).split("FAULTS")[1]) < 2500  # those of the fit itself


@pytest.mark.parametrize(
    ("environment", "kept"), [({}, True), ({"ALLREDUCE_MALLOC": "default"}, False), ({"MALLOC_ARENA_MAX": "2"}, False)]
)
def test_settings_of_the_users_own_are_left_alone(environment: dict[str, str], kept: bool) -> None:
    code = "from allreduce.process import malloc; print(malloc.keep_freed_memory())"
    assert python(code, **environment) == f"{kept}\n"
