"""Horovod's API: tests on one rank, jobs of 2 and 3 ranks, and the examples in scripts/."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

SCRIPTS = launch.ROOT / "scripts"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed in this environment"
)


def test_other_imports_of_a_script() -> None:
    import torch

    import trainers.horovod as horovod
    from trainers.horovod.torch import mpi_ops

    assert horovod.torch is sys.modules["trainers.horovod.torch"]  # and not PyTorch
    assert horovod.torch.mpi_ops is mpi_ops
    for name in mpi_ops.__all__:
        assert getattr(horovod.torch, name) is getattr(mpi_ops, name)
    assert horovod.torch.gpu_available("torch") == torch.cuda.is_available()


def test_the_exit_code_of_a_rank_that_leaves() -> None:
    from allreduce.errors import RankLeftError
    from allreduce.health.abort import exit_code_of
    from trainers.horovod.errors import HorovodInternalError, as_internal_error

    left = RankLeftError("rank 1 has left")
    left.job_code = 3
    with pytest.raises(HorovodInternalError, match="rank 1 has left") as met:
        raise as_internal_error(left) from left
    assert exit_code_of(met.value) == 3


def test_objects_come_back_as_they_were() -> None:
    import numpy as np
    import torch

    from allreduce.errors import OptionError
    from trainers.horovod import state

    value = {
        "numbers": [1, -2.5, True, None, 1j, float("inf")],
        ("a", 1): {frozenset({1}), "x"},
        "bytes": b"\0\xff",
        "kinds": (torch.float16, torch.device("cpu"), torch.Size([2, 3])),
        "empty": [{}, [], ()],
    }
    packed, error = state.pack(value)
    found, length = state.unpack(packed)
    assert error is None
    assert found == {**value, "kinds": (torch.float16, torch.device("cpu"), (2, 3))}
    assert length == len(packed)
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    (found, number), _ = state.unpack(state.pack([array, np.float32(1.5)])[0])
    assert (found.dtype, found.tolist(), number) == (array.dtype, array.tolist(), 1.5)
    row = torch.arange(6.0)
    views = [row[::2], row[::6], row[:1].expand(3), torch.tensor([1 + 2j, 3j]).conj().imag, torch.eye(2).bfloat16()]
    for there, view in zip(state.unpack(state.pack(views)[0])[0], views, strict=True):
        assert (there.dtype, there.tolist()) == (view.dtype, view.tolist())
    for bad in (object(), len, np.array([object()]), [{"deep": Path()}]):
        packed, error = state.pack(bad)
        assert isinstance(error, OptionError)
        with pytest.raises(OptionError, match="no pickle"):
            state.unpack(packed)


def test_which_gradients_are_averaged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from allreduce.errors import OptionError
    from trainers.horovod.optimizer import GROUP_BYTES_NAME, _groups

    parameters = [torch.zeros(length) for length in (5, 300_000, 7, 1000, 250_000, 20_000)]  # float32: 4 bytes

    def together() -> list[list[int]]:
        return [[each.numel() for each in group] for group in _groups(parameters, None)]

    assert _groups([], None) == []
    assert together() == [[20_000], [250_000, 1000, 7], [300_000], [5]]  # of at most 1 MiB, from the last one on
    monkeypatch.setenv(GROUP_BYTES_NAME, "0")
    assert together() == [[each.numel()] for each in reversed(parameters)]
    monkeypatch.setenv(GROUP_BYTES_NAME, "64MB")
    with pytest.raises(OptionError, match="number of bytes"):
        together()


def test_the_whole_of_it(mpirun: JobRunner) -> None:
    job = mpirun(3, ["-m", "tests.frameworks.horovod_job"], timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.splitlines()[-1] == "never_comes"
    assert re.search(r"rank 0 has waited \d+ s for other ranks in: allreduce.never: float32 \[2\]", job.stderr)


@pytest.mark.expensive
def test_benchmark(mpirun: JobRunner) -> None:
    job = mpirun(2, [SCRIPTS / "hvd_synthetic_benchmark.py", "--iterations", "2", "--width", "64"], timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "samples/s on 2 ranks" in job.stdout


def test_a_rank_is_lost(mpirun: JobRunner) -> None:
    """Two of three ranks continue from the last commit with equal parameters, and divide the rest of the epoch."""
    program = "import runpy, sys, tests.without_dynamo; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    options = ["-c", program, SCRIPTS / "hvd_elastic.py", "--epochs", "3", "--lose", "1"]
    job = mpirun(3, options, ulfm=True, timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("continues as rank") == 2
    assert "2 ranks: test accuracy 0.9" in job.stdout
