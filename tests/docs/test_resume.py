"""The PyTorch program of the site continues its learning-rate schedule after a stop, as if it had not been stopped.

Its schedule is a warm-up: the scheduler's constructor changes the learning rate, so the optimizer's state must be
loaded after the scheduler was created.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner, lacking

FOLDER = launch.ROOT / "docs" / "programs"

# Runs a program uninterrupted and keeps its second checkpoint; then runs it again from that checkpoint.
TWICE = """
import os, runpy, shutil, sys
import torch
import allreduce
ranks = allreduce.Topology()
save, saved = torch.save, []
def keep_second(state, file):
    save(state, file)
    saved.append(file)
    if len(saved) == 2:
        shutil.copy(file, "second.pt")
torch.save = keep_second
runpy.run_path(sys.argv[1], run_name="__main__")
ranks.world.Barrier()
torch.save = save
if ranks.rank == 0:
    os.replace("second.pt", "checkpoint.pt")
ranks.world.Barrier()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(("program", "ranks"), [("before/torch_dataloader.py", 1), ("torch_dataloader.py", 2)])
def test_learning_rates_after_a_resume(mpirun: JobRunner, tmp_path: Path, program: str, ranks: int) -> None:
    if not find_spec("torch"):
        lacking("torch is not installed")
    job = mpirun(ranks, ["-c", TWICE, FOLDER / program], cwd=tmp_path, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    _, uninterrupted, resumed = job.stdout.split("starts at epoch")
    rates = [line.split(": rate ")[1].split(",")[0] for line in uninterrupted.splitlines() if ": rate " in line]
    again = [line.split(": rate ")[1].split(",")[0] for line in resumed.splitlines() if ": rate " in line]
    assert rates == ["0.0003", "0.0012", "0.0021", "0.0030", "0.0030", "0.0030"]
    assert again == rates[2:]
