"""allreduce.torch_backend.require reports a process group of another backend, and a model that ours does not average.

That Lightning, Accelerate and Transformers train over our process group is tested in tests/docs/test_programs.py.
"""

from collections.abc import Iterator

import pytest

from allreduce.errors import UnavailableError
from tests.conftest import JobRunner

torch = pytest.importorskip("torch")
dist = torch.distributed
require = pytest.importorskip("allreduce.torch_backend").require


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
