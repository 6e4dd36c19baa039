"""The command that runs a file of PyTorch's tests, on a file of our own."""

from pathlib import Path

import pytest

from tests import launch

FILE = """
import unittest
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

class Made(MultiProcessTestCase):
    def start(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
    def test_backend(self):
        self.start()
        globals()["seen"] = True
        assert dist.get_backend() == "allreduce" and dist.get_world_size() == 2
    def test_one_rank(self):
        self.start()
        assert self.rank == 0
    @skip_if_lt_x_gpu(8)
    def test_gpus(self):
        self.start()
    @unittest.skip("")
    def test_never(self):
        raise AssertionError
"""


@pytest.mark.expensive
@pytest.mark.jobs
@pytest.mark.parametrize(("cpu_only", "passed", "skipped"), [("0", 1, 2), ("1", 2, 1)])
def test_a_test_passes_if_it_passes_on_all_ranks(tmp_path: Path, cpu_only: str, passed: int, skipped: int) -> None:
    pytest.importorskip("expecttest")
    path = tmp_path / "test_made.py"
    path.write_text(FILE)
    job = launch.mpirun(2, ["-m", "tests.programs.pytorch_file", "allreduce", path], env={"CPU_ONLY": cpu_only})
    assert job.returncode == 1
    counts = job.stdout.strip().splitlines()[-1]
    assert counts.startswith("test_made.py over allreduce, 2 ranks: ")
    assert f"'passed': {passed}" in counts
    assert f"'skipped': {skipped}" in counts
    assert "'failed': 1" in counts
    assert "failed  Made.test_one_rank" in job.stdout
