"""What tests share. Tests that run on several ranks live in ranks/ and are started by test_ranks.py."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import launch

JobRunner = Callable[..., "subprocess.CompletedProcess[str]"]


def lacking(reason: object) -> None:
    """Skip, or fail where nothing may be missing (scripts/test.sh sets ALLREDUCE_TEST_REQUIRE=1)."""
    if os.environ.get("ALLREDUCE_TEST_REQUIRE") == "1":
        pytest.fail(str(reason), pytrace=False)
    pytest.skip(str(reason))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rank_driver: runs the tests in ranks/; -k and -m are left to those")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Keep -k and -m from deselecting the driver: it hands them to the tests inside."""
    drivers = [item for item in items if item.get_closest_marker("rank_driver")]
    items[:] = [item for item in items if item not in drivers]
    yield
    items.extend(drivers)


@pytest.fixture
def mpirun() -> JobRunner:
    """`mpirun(ranks, args, mpi="openmpi", timeout=60, env=None, cwd=None)`; see launch.mpirun.

    The args are those of python: `mpirun(2, ["-m", "trainers", "--data", "iris"])`. It returns a
    CompletedProcess with returncode, stdout and stderr.
    """

    def run(ranks: int, args: list[Any], **options: Any) -> "subprocess.CompletedProcess[str]":
        try:
            return launch.mpirun(ranks, args, **options)
        except launch.MissingEnvironmentError as error:
            lacking(error)
            raise

    return run
