"""allreduce.torch_backend.require reports a process group of another backend.

tests/ranks/torch_backend/test_calls.py has models whose gradients ours does not average. That Lightning, Accelerate and
Transformers train over our process group is tested in tests/docs/test_programs.py.
"""

from collections.abc import Iterator

import pytest

from allreduce.errors import UnavailableError

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
