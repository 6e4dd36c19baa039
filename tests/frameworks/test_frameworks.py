"""The recipes for other frameworks train over our process group; a process group of another backend is reported."""

import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from allreduce.errors import UnavailableError
from allreduce.torch_backend import require
from tests import launch
from tests.conftest import JobRunner, lacking

# The recipes, and how large the loss at their end may be.
RECIPES = {"with_fabric": 0.05, "with_lightning": 0.05, "with_accelerate": 0.05, "with_transformers": 0.67}
ONE_AFTER_ANOTHER = """
import runpy, sys
import torch.distributed as dist
for recipe in sys.argv[1:]:
    runpy.run_path(f"scripts/{recipe}.py", run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def test_recipes_train_on_our_process_group(mpirun: JobRunner) -> None:
    """In one job, because importing the frameworks takes longer than the trainings."""
    for package in ("lightning", "accelerate", "transformers"):
        if importlib.util.find_spec(package) is None:
            lacking(f'{package} is not installed; pip install ".[frameworks]" in the checkout')
    job = mpirun(2, ["-c", ONE_AFTER_ANOTHER, *RECIPES], timeout=300, env={"HF_HUB_OFFLINE": "1"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("torch.distributed: allreduce, auto on 2 ranks on 1 node") == len(RECIPES), job.stdout
    losses = re.findall(r"^loss ([0-9.]+).* on 2 ranks$", job.stdout, re.M)
    assert len(losses) == len(RECIPES), job.stdout
    for (recipe, most), loss in zip(RECIPES.items(), losses, strict=True):
        assert float(loss) < most, recipe


@pytest.mark.parametrize(
    ("script", "package", "extras"),
    [
        ("with_lightning", "lightning", "torch,frameworks"),
        ("with_fabric", "lightning", "torch,frameworks"),
        ("with_accelerate", "accelerate", "torch,frameworks"),
        ("with_transformers", "transformers", "torch,frameworks"),
        ("jax_digits", "jax", "jax"),
    ],
)
def test_a_missing_extra_is_named(script: str, package: str, extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=re.escape(f'pip install ".[{extras}]" in the checkout')):
        runpy.run_path(str(launch.ROOT / "scripts" / f"{script}.py"))


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_process_group_is_told() -> None:
    with pytest.raises(UnavailableError, match=r'no process group; call torch.distributed.init_process_group\("allr'):
        require()


@pytest.mark.usefixtures("gloo")
def test_the_process_group_of_another_backend_is_told() -> None:
    with pytest.raises(UnavailableError, match='runs on "gloo", not on "allreduce"'):
        require(torch.nn.Linear(1, 1))


REFUSED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from allreduce.torch_backend import require

def said(model=None):
    try:
        return require(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

dist.init_process_group("allreduce", pg_options="ring")
model = torch.nn.Linear(1, 1)
mine = DistributedDataParallel(model)
other = DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))
if dist.get_rank() == 1:
    print(said(), said(torch.nn.Sequential(mine)), said(model), said(other), sep="\\n", flush=True)
dist.destroy_process_group()
"""


def test_a_model_that_is_not_averaged_by_us_is_told(mpirun: JobRunner) -> None:
    job = mpirun(2, ["-c", REFUSED])
    assert job.returncode == 0, job.stderr
    line = "torch.distributed: allreduce, ring on 2 ranks on 1 node"
    plain, averaged, unwrapped, other = job.stdout.splitlines()
    assert (plain, averaged) == (line, line)
    assert unwrapped.startswith("UnavailableError: Linear holds no DistributedDataParallel, so its gradients are not")
    assert other == (
        'UnavailableError: the model\'s DistributedDataParallel averages over "gloo", not over "allreduce"'
    )
