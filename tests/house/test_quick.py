"""`scripts/test.sh --quick` (the tests that it leaves out), the tests of a change, and the cases that a job runs."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed, launch
from tests.ranks import jobs, pairs

CHUNKS = "tests/collectives/test_chunks.py"


def collected(*arguments: str, quick: bool = False, **variables: str) -> list[str]:
    modes = {"ALLREDUCE_TEST_QUICK": "1" if quick else "", "ALLREDUCE_TEST_CHANGED": ""}
    environment = {**os.environ, **modes, **variables}
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


def test_a_change_runs_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(path: str) -> set[str]:
        monkeypatch.setattr(changed, "changed", lambda: [path])
        return changed.tests() - {changed.RULES}

    assert of(CHUNKS) == {CHUNKS}
    assert of("tests/gone/test_gone.py") == of("LICENSE") == set()
    assert of("docs/programs/torch_ddp.py") == {"tests/docs/test_programs.py::test_program[torch_ddp.py]"}
    assert changed.about("tests/docs/test_programs.py::test_program[torch_ddp.py]")
    assert not changed.about("tests/docs/test_programs.py::test_program[with_fabric.py]")
    assert "tests/house/test_kubernetes.py" in of("scripts/kubernetes/trainjob.yaml") & of("Dockerfile")
    tests = of("allreduce/arrays/chunks.py")
    assert CHUNKS in tests
    assert "tests/ranks/collectives/test_grid.py" in changed.tests_on_ranks()
    assert not any(name.startswith("tests/apps/") for name in tests)
    assert "tests/matrix/test_matrix.py" in of("trainers/strategies/rule.py") & of("trainers/pytorch/buffer.py")
    assert {*of("tests/ranks/grid.py")} == {
        _name(path) for path in changed.test_files() if "tests.ranks.grid" in path.read_text()
    }
    assert set(changed.FOLDERS) == {name for name in changed.FOLDERS if (launch.ROOT / name).exists()}


def _name(path: Path) -> str:
    return path.relative_to(launch.ROOT).as_posix()


def test_every_file_runs_on_two_ranks_of_open_mpi() -> None:
    """A line JOBS names MPIs and numbers of ranks that the driver has."""
    every = sorted((launch.ROOT / "tests" / "ranks").glob("*/test_*.py"))
    assert jobs.files("openmpi", 2) == every
    for path in every:
        found = jobs.jobs(path)
        assert found.keys() <= {*launch.MPIS, "quick"}, path
        assert all(0 < min(ranks) <= max(ranks) <= 5 for ranks in found.values()), path
    assert [path.stem for path in jobs.files("mpich", 5)] == ["test_grid"]


STARTS = """
import subprocess
import sys

import pytest

from tests.conftest import in_one_job
from tests.launch import mpirun, started


def test_started(): started(["/x/mpirun", "-n", "2", "true"], None, None).__enter__()
def test_directly(): subprocess.run(["timeout", "9", "mpiexec", "-n", "2", "true"])
def test_by_a_shell(): subprocess.run(["sh", "-c", '"$1/mpirun" -n 2 true', "sh", "/x"])
def test_in_one_job(tmp_path): in_one_job(2, [("trainers.cli.main", ["--help"], ".")], tmp_path)
def test_on_ranks(): mpirun(2, ["-c", ""])
def test_starts_none(): subprocess.run([sys.executable, "-c", "'mpirun'"], check=True)


@pytest.mark.jobs
def test_marked(): subprocess.run(["true", "mpirun"], check=True)
"""


def test_every_run_finds_a_test_that_starts_a_job_without_the_mark(tmp_path: Path) -> None:
    """Wherever the job starts, so that it fails in the run before a merge, not in another person's first minutes."""
    (tmp_path / "test_starts.py").write_text(STARTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import LAUNCHES\n")
    environment = {**os.environ, "ALLREDUCE_TEST_QUICK": "", "PYTHONPATH": str(launch.ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--color=no", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    outcomes = {
        line.split()[1].partition("::")[2]: line.split()[0] for line in done.stdout.splitlines() if "::" in line
    }
    refused = {"test_started", "test_directly", "test_by_a_shell", "test_in_one_job", "test_on_ranks"}
    assert {name for name, outcome in outcomes.items() if outcome == "FAILED"} == refused, done.stdout
    assert {name for name, outcome in outcomes.items() if outcome == "PASSED"} == {"test_starts_none", "test_marked"}
    assert done.stdout.count("starts a job; mark it: @pytest.mark.jobs") >= len(refused)


@pytest.mark.parametrize("job", ["3 ranks", "5 ranks"])
def test_a_job_runs_each_value_and_the_pairs_that_two_ranks_lack(job: str) -> None:
    axes = ("ring", "native", "a+b"), ("flat", "twos", "uneven"), "hijk", "lm"
    product = list(itertools.product(*axes))
    grid = [f"t.py::test_grid[{'-'.join(each)}]" for each in product]
    marked = [f"t.py::test_two[{x}-{y}]" for x in "ab" for y in "cd"]
    whole = [*marked, "t.py::test_none", "t.py::test_odd[a-b]", "t.py::test_odd[a]"]
    found = pairs.chosen([*grid[::2], *whole, *grid[1::2]], job, ["t.py::test_two"])
    assert set(whole) <= found
    kept = [each for each, name in zip(product, grid, strict=True) if name in found]
    assert len(kept) < len(product) / 3
    for number, values in enumerate(axes):
        assert {each[number] for each in kept} == set(values)
    for one, other in itertools.combinations(range(4), 2):
        own = {pair for each in product if {"a+b", "twos", "uneven"} & {*(pair := (each[one], each[other]))}}
        assert own <= {(each[one], each[other]) for each in kept}
    assert found == pairs.chosen([*grid, *whole], job, ["t.py::test_two"])
    assert found != pairs.chosen([*grid, *whole], "another", ["t.py::test_two"])
    assert len(pairs.chosen(marked, job)) == 2
    nodes = ["t.py::test_nodes[shared-flat]", "t.py::test_nodes[shared-twos]"]  # where "shared" is refused
    assert pairs.chosen(nodes, job) == {nodes[0]}
