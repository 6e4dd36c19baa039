"""Keras 3: trainers.keras on two ranks, with the backends that are installed for tests."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner, lacking
from tests.frameworks.test_jax import SILENT

JAX = {**launch.COMPILED_ONCE, **SILENT, "KERAS_BACKEND": "jax", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
TORCH = {**SILENT, "KERAS_BACKEND": "torch"}


@pytest.fixture(autouse=True)
def keras_is_there() -> None:
    if not all(map(find_spec, ("keras", "jax", "torch"))):
        lacking('Keras, JAX or PyTorch is not installed: pip install ".[keras,jax,torch]" in the checkout')


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        pytest.param(TORCH, ["data", "fit", "rest", "replica", "trainers"], id="torch"),
        pytest.param(JAX, ["fit", "sharded"], id="jax", marks=pytest.mark.expensive),
    ],
)
def test_job(mpirun: JobRunner, tmp_path: Path, environment: dict[str, str], parts: list[str]) -> None:
    """All checks of keras_job.py; with JAX a part of them. With TensorFlow it is run by hand."""
    job = mpirun(2, ["-m", "tests.frameworks.keras_job", *parts, tmp_path], timeout=300, env=environment)
    assert job.returncode == 0, job.stdout + job.stderr
    for rank in (0, 1):
        assert f"rank {rank} is done" in job.stdout.splitlines()
