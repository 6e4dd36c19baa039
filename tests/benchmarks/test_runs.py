"""The command lines of the benchmarks, run under mpirun: complete runs, and every refused argument."""

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.results import load
from tests import launch
from tests.conftest import JobRunner, Program, in_one_job, lacking

pytestmark = pytest.mark.jobs
QUICK = ["-n", "3", "-w", "1"]
MODULE = ["-m", "benchmarks.bandwidth"]


@pytest.fixture
def quiet() -> dict[str, str]:
    """Return the environment variables for a run without this user's table."""
    return {"ALLREDUCE_TABLE": ""}


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_every_backend_and_every_output(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str], mpi: str) -> None:
    files = {option: tmp_path / f"run.{option}" for option in ("json", "csv")}
    outputs = [part for option, path in files.items() for part in (f"--{option}", path)]
    sweep = ["-b", "4", "-e", "256K", "-f", "256"]
    job = mpirun(2, [*MODULE, *sweep, *QUICK, *outputs, "--peers", "mpi4py", "--verbose"], mpi=mpi, env=quiet)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert "# Out of bounds values : 0 OK" in lines
    run = load(files["json"])
    assert {"ring", "halving_doubling", "reduce_to_one", "shared", "native", "auto", "mpi4py"} <= set(run.backends())
    assert {result.size for result in run.results} == {4, 1024, 262144}
    assert {(result.wrong, result.iterations) for result in run.results} == {(0, 3)}
    assert all(0 < result.min_us <= result.time_us <= result.p99_us for result in run.results)
    rows = [line for line in lines if not line.startswith("#")]
    assert len(rows) == len({(result.size, result.backend) for result in run.results})
    table = list(csv.DictReader(files["csv"].open()))
    found = [(row["backend"], row["type"], row["ranks"], float(row["time_us"])) for row in table]
    assert found == [(result.backend, "float32", "2", result.time_us) for result in run.results]
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_ctrl_c_on_one_rank(tmp_path: Path, quiet: dict[str, str]) -> None:
    try:
        python = launch.environment("openmpi") / "bin" / "python"
    except launch.MissingEnvironmentError as error:
        lacking(error)
    options = "-b 8 -e 8 -n 5000000 --backends native --verbose --json run.json"
    command = [str(python), *MODULE, *options.split()]
    env = {**os.environ, **quiet, "PYTHONPATH": str(launch.ROOT), "PYTHONUNBUFFERED": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes) as job:
        try:
            assert job.stdout is not None
            while not (line := job.stdout.readline()).startswith("#        (B)"):  # now it measures
                assert line, job.stderr
            job.send_signal(signal.SIGINT)
            _, told = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 130
    assert told.splitlines()[-1] == "benchmarks.bandwidth: interrupted"
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


REFUSED = {
    "bandwidth -b 12Q": "'12Q' is not a size",
    f"bandwidth -b {'9' * 400}G": "is not a size",
    "bandwidth --budge 1": "unrecognized arguments: --budge 1; did you mean --budget?",
    "bandwidth --warmup-iters 1": "did you mean --warmup_iters?",
    "bandwidth -f inf": "must be a number >= 1.01, got 'inf'",
    "bandwidth -d complex64": "complex64 can't be reduced",
    "bandwidth -o median": "'median' is unknown",
    "bandwidth -n 0": "must be an integer >= 1, got '0'",
    "bandwidth --ranks-per-node 0": "one per node such as 3,1",
    "bandwidth --ranks-per-node 2,2": "can't describe 2 ranks",
    "bandwidth --backends shard": "did you mean 'shared'?",
    "bandwidth --backends nccl -e 8": "nccl",
    "bandwidth --backends native -d half": "native does not reduce float16",
    "bandwidth --peers glue": "did you mean 'gloo'?",
    "bandwidth --backends shared --also notes.json": "error: rank 0: --also: ",
    "bandwidth -o avg -d int32": "not defined for int32",
    "bandwidth -b 1K -e 8": "no size between them",
    "bandwidth -e 100000G --backends native": "2 ranks need",
    "bandwidth --json none/run.json": "the folder none does not exist",
    f"bandwidth --json {'x' * 300}": "File name too long",
    "bandwidth --json=": "give the name of a file",
    "bandwidth --csv .": "this is a folder",
    "bandwidth --plot picture.txt": ".png",
    "bandwidth --json same --csv same": "two outputs go to the same file",
    "tune --output notes.json": "notes.json would be overwritten: it has no constants",
    "tune --output none/t.json": "does not exist",
    "tune --output t.json --iters 0": "must be an integer >= 1",
}
MISSING = {"bandwidth --peers=gloo": "torch", "bandwidth --plot=p.png": "bench", "bandwidth --html=p.html": "bench"}
ONE_RANK = ("bandwidth -b 64 -e 64", "tune --output t.json", "strategies --json r.json")
RUNS = (
    "latency -e 2K -f 64 --turns 1 --json run.json",
    "bandwidth -b 4 -e 256K -f 256 --json run.json",
    "bandwidth --ranks-per-node 1,1 -d double -o avg -b 8K -e 8K --json run.json",
    "full.py -b 8 -e 8 --backends native --json run.json --csv run.csv",
    "spoilt.py -b 1K -e 1K --backends native,ring",
)
SCRIPTS = {
    "full.py": """
import sys
from unittest import mock
from benchmarks import bandwidth
with mock.patch.object(bandwidth, "to_json", side_effect=OSError(28, "No space left on device")):
    sys.exit(bandwidth.main())
""",
    # native spoils one element of its result on one rank
    "spoilt.py": """
import sys
from unittest import mock
from allreduce import Work
from allreduce.algorithms.native import Native
from benchmarks import bandwidth
def spoiling(self, call, op):
    def spoil(buffer):
        self.reduce(buffer, op)
        buffer[buffer.size // 2] += self.rank == 1
    return Work(spoil)
with mock.patch.object(Native, "work", spoiling):
    sys.exit(bandwidth.main())
""",
}
NOTES = '{"mine": 1}'


class Outcomes:
    """The outcomes of command lines. Those of one list run in one job, which starts when the first outcome is
    requested."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[int, str], tuple[Path, list[dict[str, Any]]]] = {}

    def of(self, ranks: int, wanted: str, together: Iterable[str], **job: Any) -> Any:
        """Return the folder in which a command line ran, and the outcome on each rank."""
        if (ranks, wanted) not in self._found:
            lines = list(together)
            here = self._folder / str(len(self._found))
            folders = [here / str(index) for index in range(len(lines))]
            for folder in folders:
                folder.mkdir(parents=True)
                (folder / "notes.json").write_text(NOTES)
            for name, text in SCRIPTS.items():
                (here / name).write_text(text)
            cases: list[Program] = []
            for line, folder in zip(lines, folders, strict=True):
                program, *options = line.split()
                quick = {"bandwidth": QUICK, "tune": QUICK[:2], **dict.fromkeys(SCRIPTS, QUICK)}.get(program, [])
                where = here / program if program in SCRIPTS else f"benchmarks.{program}"
                cases.append((where, [*quick, *options], folder))
            for line, folder, outcome in zip(lines, folders, in_one_job(ranks, cases, here, **job), strict=True):
                self._found[ranks, line] = folder, outcome
        return self._found[ranks, wanted]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("outcomes"))


def refused(folder: Path, ranks: list[dict[str, Any]], complaint: str) -> None:
    """All ranks left with code 2, one rank said why in one line, and nothing was measured or written."""
    assert [rank["code"] for rank in ranks] == [2] * len(ranks)
    told = "".join(rank["stderr"] for rank in ranks)
    assert told.count("error: ") == 1, told
    assert complaint in told
    assert "Traceback" not in told
    assert not any("float" in rank["stdout"] for rank in ranks), "it began to measure"
    assert [path.name for path in folder.iterdir()] == ["notes.json"]
    assert (folder / "notes.json").read_text() == NOTES


@pytest.mark.parametrize("line", REFUSED)
def test_refused_before_measuring(outcomes: Outcomes, quiet: dict[str, str], line: str) -> None:
    if line == "bandwidth --backends nccl -e 8" and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    refused(*outcomes.of(2, line, REFUSED, env=quiet), REFUSED[line])


@pytest.mark.parametrize("line", MISSING)
def test_what_is_missing_is_named_with_its_extra(
    outcomes: Outcomes, quiet: dict[str, str], tmp_path: Path, line: str
) -> None:
    for module in ("torch", "matplotlib"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(f"raise ModuleNotFoundError('no module {module} here')")
    variables = {**quiet, "PYTHONPATH": f"{launch.ROOT}:{tmp_path}"}
    job = outcomes.of(2, line, MISSING, env=variables)
    refused(*job, f'pip install ".[{MISSING[line]}]" in the checkout')


def test_short_calls_beside_mpi4py(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    folder, (rank, _) = outcomes.of(2, RUNS[0], RUNS, env=quiet)
    assert rank["code"] == 0, rank["stderr"]
    found = json.loads((folder / "run.json").read_text())["results"]
    ways = ["mpi4py", "bound", "allocated", "foreign"]
    assert [(each["size"], each["way"]) for each in found] == [(size, way) for size in (32, 2048) for way in ways]
    assert all(each["loop_us"] > 0 and each["cold_us"] > 0 for each in found)
    bare = [line.split() for line in rank["stdout"].splitlines() if "mpi4py " in line and "size" not in line]
    assert [(row[4:6], row[-1]) for row in bare] == [(["+0.00", "1.00"], "1.00")] * 2


def test_a_person_reads_a_line_for_each_size_and_one_sentence(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    folder, (rank, other) = outcomes.of(2, RUNS[1], RUNS, env=quiet)
    assert rank["code"] == 0, rank["stderr"]
    lines = rank["stdout"].splitlines()
    sizes = [line.split()[:2] for line in lines if not line.startswith("#")]
    assert sizes == [["4", "B"], ["1", "KiB"], ["256", "KiB"]]
    advice = json.loads((folder / "run.json").read_text())["advice"]
    assert lines[-1] == f"# {advice}"
    assert len(lines) <= 13
    assert sum(line.startswith("# all ranks at once copy ") for line in lines) == 1
    assert "size/s" not in rank["stderr"]  # no progress bar: stderr is no terminal
    assert other["stdout"] == ""


def test_simulated_nodes(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    folder, (rank, _) = outcomes.of(2, RUNS[2], RUNS, env=quiet)
    assert rank["code"] == 0, rank["stderr"]
    run = load(folder / "run.json")
    assert (run.node_sizes, run.simulated, run.dtype, run.op) == ([1, 1], True, "float64", "mean")
    assert "hierarchical_copy" in run.backends()
    assert "shared" in run.skipped
    assert run.machine["memory_gbs"] > 0
    assert "network_gbs" not in run.machine  # simulated nodes have none
    assert {result.wrong for result in run.results} == {0}


def test_an_output_that_fails_at_the_end_leaves_the_others(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    """Only rank 0 gets the error, after the measurement; no rank hangs, and the other outputs are written."""
    folder, ranks = outcomes.of(2, RUNS[3], RUNS, env=quiet)
    told = "".join(rank["stderr"] for rank in ranks)
    assert [rank["code"] for rank in ranks] == [2, 2], told
    assert "--json run.json was not written: OSError: [Errno 28] No space left on device" in told
    assert told.count("error: ") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["notes.json", "run.csv"]


def test_wrong_results_are_counted_and_fail_the_run(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    _, (rank, other) = outcomes.of(2, RUNS[4], RUNS, env=quiet)
    assert [rank["code"], other["code"]] == [1, 1], rank["stderr"]
    assert "# Out of bounds values : 2 FAILED" in rank["stdout"]
    assert "WRONG RESULTS: native, foreign arrays, 1 KiB: 1 elements" in rank["stdout"]
    assert "WRONG RESULTS: ring" not in rank["stdout"]
    assert 'Do not use "native" here' in rank["stdout"]


def test_one_rank_works_and_says_that_it_means_nothing(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    _, (rank,) = outcomes.of(1, ONE_RANK[0], ONE_RANK, env=quiet)
    assert rank["code"] == 0, rank["stderr"]
    assert "Start at least 2 ranks (mpirun -n 2): one rank has nothing to reduce" in rank["stdout"]


def test_tune_writes_merges_and_auto_reads(mpirun: JobRunner, tmp_path: Path) -> None:
    """In the folder where auto looks by default, and in the one that it is given."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    lines: list[list[str]] = [[], ["--ranks-per-node", "1"], ["--iters", "2"], ["--output", "other.json"]]
    cases = [("benchmarks.tune", ["-n", "3", *line], str(tmp_path)) for line in lines]
    for ranks in in_one_job(2, cases, tmp_path, env=cache):
        assert [rank["code"] for rank in ranks] == [0, 0], ranks
    (table,) = (tmp_path / "cache" / "allreduce").iterdir()
    for path, expected in (
        (table, [([1, 1], True), ([2], False)]),
        (tmp_path / "other.json", [([2], False)]),
    ):
        entries = json.loads(path.read_text())["entries"]
        assert sorted((entry["node_sizes"], entry["simulated"]) for entry in entries) == expected
        assert all(entry["constants"]["native_alpha"] > 0 for entry in entries)
    script = "import allreduce\nwith allreduce.create('auto') as reduce:\n    reduce(reduce.allocate(999), 'sum')\n"
    used = mpirun(2, ["-c", script], env=cache)
    assert used.returncode == 0, used.stderr
    assert f"by the constants of {table}" in used.stderr


def test_one_rank_is_refused(outcomes: Outcomes, quiet: dict[str, str]) -> None:
    refused(*outcomes.of(1, ONE_RANK[1], ONE_RANK, env=quiet), "one rank has nothing to reduce")
    too_few = "benchmarks.strategies: error: too few ranks for these strategies: 1; start more\n"
    refused(*outcomes.of(1, ONE_RANK[2], ONE_RANK, env=quiet), too_few)


@pytest.mark.expensive
def test_the_cost_of_second_copies(mpirun: JobRunner) -> None:
    pytest.importorskip("torch")
    options = ["--models", "conv", "--batch", "4", "--steps", "4", "--verify", "0", "--no-memory"]
    job = mpirun(2, ["-m", "benchmarks.training_step", *options, "--variants", "sharded; sharded, copies=2"], ulfm=True)
    assert job.returncode == 0, job.stderr
    assert re.search(r"^ +sharded, copies=2 +4 +\d", job.stdout, re.MULTILINE), job.stdout
