"""JAX: the benchmark. tests/docs/test_programs.py has loops, tests/ranks/frameworks/test_jax.py the rest."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner, lacking

VARIANTS = ("none", "replica", "pmean", "gloo")
SILENT = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # of compilations that take long, on busy cores
DEVICES = "--xla_force_host_platform_device_count=2"
ENVIRONMENT = {**launch.COMPILED_ONCE, "XLA_FLAGS": DEVICES}  # of the tests on ranks


@pytest.fixture(autouse=True)
def jax_is_there() -> None:
    if not all(map(find_spec, ("jax", "optax"))):
        lacking('JAX and optax are not installed: pip install ".[jax]" in the checkout')


@pytest.mark.expensive
def test_benchmark(mpirun: JobRunner, tmp_path: Path) -> None:
    """All variants, JAX's own collectives among them, in the same processes."""
    options = ["--parameters", "0.02", "--steps", "2", "--batch", "4", "--json", tmp_path / "out.json"]
    job = mpirun(2, ["-m", "benchmarks.jax_step", *options], timeout=300, env=SILENT)
    assert job.returncode == 0, job.stdout + job.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {name: len(each) for name, each in result["ms"].items()} == dict.fromkeys(VARIANTS, 2)
    assert all(value > 0 for each in result["ms"].values() for value in each)
