"""`scripts/test.sh --quick` (the tests that it leaves out, the order of files), and the report of times after a long
run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import launch
from tests.conftest import longest_first, seconds_by_file

CHUNKS = "tests/collectives/test_chunks.py"


def collected(*arguments: str, quick: bool) -> list[str]:
    environment = {**os.environ, "ALLREDUCE_TEST_QUICK": "1" if quick else ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=launch.ROOT, env=environment)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_a_quick_run_starts_three_jobs_under_one_mpi() -> None:
    files = ["tests/test_ranks.py", "tests/health/test_abort.py", "tests/benchmarks/test_cluster_sim.py", CHUNKS]
    tests = collected("-m", "not jobs", *files, quick=True)
    drivers = [f"tests/test_ranks.py::test_ranks[openmpi-{ranks}ranks]" for ranks in (1, 2, 3)]
    assert tests[-3:] == drivers
    assert {test.partition("::")[0] for test in tests[:-3]} == {CHUNKS}
    assert len(collected("tests/test_ranks.py", quick=False)) == 10


def test_workers_begin_with_the_jobs() -> None:
    """First the driver's jobs, then the files with most jobs; the tests of a file keep their order."""

    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(name=name, path=Path(name).parent, get_closest_marker=lambda mark: mark in marks)

    plain, one = [item("a/1"), item("a/2")], [item("b/1"), item("b/2", "jobs")]
    two, driver = [item("c/1", "jobs"), item("c/2", "jobs")], [item("d/1", "rank_driver")]
    items = [*plain, *one, *two, *driver]
    longest_first(items)
    assert items == [*driver, *two, *one, *plain]


def report(nodeid: str, when: str, duration: float, **properties: object) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration, user_properties=list(properties.items())
    )


def test_time_goes_to_files_and_to_files_within_jobs() -> None:
    job = "tests/test_ranks.py::test_ranks[openmpi-2ranks]"
    inside = {"collectives/test_grid.py": 5.0, "collectives/test_errors.py": 3.0}
    reports = [
        report("tests/test_a.py::test_one", "setup", 1.0),
        report("tests/test_a.py::test_two[x]", "call", 2.0),
        report(job, "call", 10.0, seconds=inside),
        report(job, "teardown", 0.0, seconds=inside),
    ]
    spent = seconds_by_file({"passed": reports[1:], "": reports[:1], "warnings": [object()]})
    assert {name: seconds for name, seconds in spent.items() if seconds} == {
        "tests/test_a.py": 3.0,
        "collectives/test_grid.py in test_ranks[openmpi-2ranks]": 5.0,
        "collectives/test_errors.py in test_ranks[openmpi-2ranks]": 3.0,
        "test_ranks[openmpi-2ranks]: starting and ending": 2.0,
    }
