"""The harness for tests on ranks: a failure on one rank is a failure of all, hangs end, and no test passes without
running."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import launch
from tests.conftest import JobRunner

BOTH = pytest.mark.parametrize("mpi", launch.MPIS)
Inner = Callable[..., tuple[int, str, list[dict[str, int]]]]
HEAD = "import pytest, time\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"


@pytest.fixture
def mpi() -> str:
    """The MPI for tests of the harness itself."""
    return "openmpi"


@pytest.fixture
def inner(mpirun: JobRunner, tmp_path: Path, mpi: str) -> Inner:
    """`inner(body, options...)` runs tests on two ranks and returns (code, text, reports)."""

    def run(body: str, *options: str, **environment: str) -> tuple[int, str, list[dict[str, int]]]:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        shutil.copy(launch.ROOT / "tests" / "ranks" / "conftest.py", tmp_path)
        (tmp_path / "test_inner.py").write_text(HEAD + body)
        variables = {"ALLREDUCE_TEST_REPORTS": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no", *options, tmp_path]
        job = mpirun(2, arguments, mpi=mpi, env=variables, cwd=tmp_path)
        reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
        return job.returncode, job.stdout + job.stderr, reports

    return run


@pytest.mark.parametrize(("mpi", "rank"), [("openmpi", 0), ("mpich", 1)])
def test_failing_on_one_rank(inner: Inner, rank: int) -> None:
    """It fails on both ranks, with the traceback of the failing one, and the next tests run. So do a set-up that fails
    on one rank, and a test that one rank skips."""
    body = (
        f"def test_one():\n    assert comm.rank != {rank}, 'only here'\n"
        f"@pytest.fixture\ndef broken():\n    assert comm.rank == {rank}\n"
        "def test_two(broken): comm.Barrier()\n"
        "def test_three():\n    if comm.rank: pytest.skip('not me')\n"
        "def test_four(): comm.Barrier()\n"
    )
    code, text, reports = inner(body)
    assert code != 0
    assert "2 failed, 1 passed, 1 error" in text
    assert f"rank {rank}: " in text
    assert "AssertionError: only here" in text
    assert "outcome on the ranks: passed, skipped" in text
    assert [report["ran"] for report in reports] == [3, 3]


@BOTH
def test_a_hang_ends_with_the_stacks_of_all(inner: Inner) -> None:
    body = "def test_one():\n    assert comm.rank == 0, 'left early'\n    comm.recv(source=1)\n"
    code, text, _ = inner(body, ALLREDUCE_TEST_WATCHDOG="1")
    assert code != 0
    assert text.count("Timeout (0:00:01)!") == 2
    assert "in test_one" in text
    assert "left early" in text


def test_different_tests_on_ranks(inner: Inner) -> None:
    code, text, _ = inner("@pytest.mark.parametrize('x', [comm.rank])\ndef test_one(x): pass\n")
    assert code != 0
    assert "the ranks collected different tests" in text
