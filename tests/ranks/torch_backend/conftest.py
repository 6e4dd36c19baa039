"""The process group of the tests of a file."""

from collections.abc import Generator
from datetime import timedelta

import pytest


@pytest.fixture(scope="module", autouse=True)
def _group() -> Generator[None]:
    import torch.distributed as dist

    import allreduce.torch_backend  # noqa: F401

    dist.init_process_group("allreduce", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()
