"""The command lines of the benchmarks, run under mpirun: complete runs, and every refused argument."""

import contextlib
import csv
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce.errors import OptionError
from benchmarks import compression
from benchmarks.lib import cli, hosts
from benchmarks.lib.peers import PEERS
from benchmarks.lib.results import COLD, load, merge, to_json
from benchmarks.lib.table import comparison
from benchmarks.strategies import VARIANTS, lineup, spread
from tests import launch
from tests.benchmarks.made_runs import made_run
from tests.conftest import JobRunner, Program, in_one_job

pytestmark = pytest.mark.jobs
QUICK = ["-n", "3", "-w", "1"]
MODULE = ["-m", "benchmarks.bandwidth"]
QUIET = {"ALLREDUCE_TABLE": ""}  # without this user's table


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_every_backend_and_every_output(mpirun: JobRunner, tmp_path: Path, mpi: str) -> None:
    files = {option: tmp_path / f"run.{option}" for option in ("json", "csv")}
    outputs = [part for option, path in files.items() for part in (f"--{option}", path)]
    sweep = ["-b", "4", "-e", "256K", "-f", "256"]
    job = mpirun(2, [*MODULE, *sweep, *QUICK, *outputs, "--peers", "mpi4py", "--verbose"], mpi=mpi, env=QUIET)
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


def test_ctrl_c_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    code = 0
    with contextlib.suppress(KeyboardInterrupt):
        code = cli.command("benchmarks.none", "", lambda parser: None, interrupted)([])
    assert code == 130
    assert capsys.readouterr().err == "benchmarks.none: interrupted\n"


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
MISSING = {"without.py --peers=gloo": "torch", "without.py --plot=p.png": "bench", "without.py --html=p.html": "bench"}
ONE_RANK = ("bandwidth -b 64 -e 64", "tune --output t.json", "strategies --json r.json")
RUNS = (
    "latency -e 2K -f 64 --turns 1 --json run.json",
    "bandwidth -b 4 -e 256K -f 256 --json run.json",
    "bandwidth --ranks-per-node 1,1 -d double -o avg -b 8K -e 8K --json run.json",
    "full.py -b 8 -e 8 --backends native --json run.json --csv run.csv",
    "spoilt.py -b 1K -e 1K --backends native,ring",
)
SCRIPTS = {
    "without.py": """
import sys
from benchmarks import bandwidth
sys.modules["torch"] = sys.modules["matplotlib"] = None
try:
    sys.exit(bandwidth.main())
finally:
    del sys.modules["torch"], sys.modules["matplotlib"]
""",
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


Outcomes = dict[str, tuple[Path, list[dict[str, Any]]]]


def ended(ranks: int, lines: Sequence[str], folder: Path) -> Outcomes:
    """Run command lines in one job; return the folder in which each of them ran, and the outcome on each rank."""
    cases: list[Program] = []
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    for number, line in enumerate(lines):
        here = folder / str(number)
        here.mkdir()
        (here / "notes.json").write_text(NOTES)
        program, *options = line.split()
        quick = {"bandwidth": QUICK, "tune": QUICK[:2], **dict.fromkeys(SCRIPTS, QUICK)}.get(program, [])
        cases.append((folder / program if program in SCRIPTS else f"benchmarks.{program}", [*quick, *options], here))
    found = in_one_job(ranks, cases, folder, env=QUIET, timeout=120)
    return {line: (Path(case[2]), outcome) for line, case, outcome in zip(lines, cases, found, strict=True)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of all command lines, on two ranks."""
    return ended(2, [*MISSING, *REFUSED, *RUNS], tmp_path_factory.mktemp("outcomes"))


def refused(outcomes: Outcomes, line: str, complaint: str) -> None:
    """All ranks left with code 2, one rank said why in one line, and nothing was measured or written."""
    folder, ranks = outcomes[line]
    told = "".join(rank["stderr"] for rank in ranks)
    assert [rank["code"] for rank in ranks] == [2] * len(ranks), f"{line}\n{told}"
    assert (told.count("error: "), "Traceback" in told) == (1, False), f"{line}\n{told}"
    assert complaint in told, line
    assert not any("float" in rank["stdout"] for rank in ranks), f"{line} began to measure"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"notes.json": NOTES}, line


def test_refused_before_measuring(outcomes: Outcomes) -> None:
    for line, complaint in REFUSED.items():
        if line != "bandwidth --backends nccl -e 8" or not os.path.exists("/dev/nvidia0"):
            refused(outcomes, line, complaint)
    for line, extra in MISSING.items():
        refused(outcomes, line, f'pip install ".[{extra}]" in the checkout')


def test_short_calls_beside_mpi4py(outcomes: Outcomes) -> None:
    folder, (rank, _) = outcomes[RUNS[0]]
    assert rank["code"] == 0, rank["stderr"]
    found = json.loads((folder / "run.json").read_text())["results"]
    ways = ["mpi4py", "bound", "allocated", "foreign"]
    assert [(each["size"], each["way"]) for each in found] == [(size, way) for size in (32, 2048) for way in ways]
    assert all(each["loop_us"] > 0 and each["cold_us"] > 0 for each in found)
    bare = [line.split() for line in rank["stdout"].splitlines() if "mpi4py " in line and "size" not in line]
    assert [(row[4:6], row[-1]) for row in bare] == [(["+0.00", "1.00"], "1.00")] * 2


def test_a_person_reads_a_line_for_each_size_and_one_sentence(outcomes: Outcomes) -> None:
    folder, (rank, other) = outcomes[RUNS[1]]
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


def test_simulated_nodes(outcomes: Outcomes) -> None:
    folder, (rank, _) = outcomes[RUNS[2]]
    assert rank["code"] == 0, rank["stderr"]
    run = load(folder / "run.json")
    assert (run.node_sizes, run.simulated, run.dtype, run.op) == ([1, 1], True, "float64", "mean")
    assert "hierarchical_copy" in run.backends()
    assert "shared" in run.skipped
    assert run.machine["memory_gbs"] > 0
    assert "network_gbs" not in run.machine  # simulated nodes have none
    assert {result.wrong for result in run.results} == {0}


def test_an_output_that_fails_at_the_end_leaves_the_others(outcomes: Outcomes) -> None:
    """Only rank 0 gets the error, after the measurement; no rank hangs, and the other outputs are written."""
    folder, ranks = outcomes[RUNS[3]]
    told = "".join(rank["stderr"] for rank in ranks)
    assert [rank["code"] for rank in ranks] == [2, 2], told
    assert "--json run.json was not written: OSError: [Errno 28] No space left on device" in told
    assert told.count("error: ") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["notes.json", "run.csv"]


def test_wrong_results_are_counted_and_fail_the_run(outcomes: Outcomes) -> None:
    _, (rank, other) = outcomes[RUNS[4]]
    assert [rank["code"], other["code"]] == [1, 1], rank["stderr"]
    assert "# Out of bounds values : 2 FAILED" in rank["stdout"]
    assert "WRONG RESULTS: native, foreign arrays, 1 KiB: 1 elements" in rank["stdout"]
    assert "WRONG RESULTS: ring" not in rank["stdout"]
    assert 'Do not use "native" here' in rank["stdout"]


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


def test_one_rank_has_nothing_to_reduce(tmp_path: Path) -> None:
    outcomes = ended(1, ONE_RANK, tmp_path)
    (rank,) = outcomes[ONE_RANK[0]][1]
    assert rank["code"] == 0, rank["stderr"]
    assert "Start at least 2 ranks (mpirun -n 2): one rank has nothing to reduce" in rank["stdout"]
    refused(outcomes, ONE_RANK[1], "one rank has nothing to reduce")
    refused(outcomes, ONE_RANK[2], "benchmarks.strategies: error: too few ranks for these strategies: 1; start more\n")


@pytest.mark.expensive
def test_the_cost_of_second_copies(mpirun: JobRunner) -> None:
    pytest.importorskip("torch")
    options = ["--models", "conv", "--batch", "4", "--steps", "4", "--verify", "0", "--no-memory"]
    job = mpirun(2, ["-m", "benchmarks.training_step", *options, "--variants", "sharded; sharded, copies=2"], ulfm=True)
    assert job.returncode == 0, job.stderr
    assert re.search(r"^ +sharded, copies=2 +4 +\d", job.stdout, re.MULTILINE), job.stdout


# Strategies


def test_what_fits_the_ranks_is_run() -> None:
    assert [each.name for each in lineup([], 2)] == ["mirrored", "central storage"]
    assert lineup([], 5) == VARIANTS
    assert [each.name for each in lineup(["2 servers, sync", "mirrored"], 3)] == ["mirrored"]


def test_servers_are_spread_over_nodes() -> None:
    assert spread([0, 0, 0, 1, 1], 2) == [2, 4]
    assert spread([0, 1, 2, 3], 2) == [2, 3]
    assert spread([0, 0, 0], 2) == [1, 2]
    assert spread([0, 0, 1], 1) == [2]
    assert spread([0, 1], 0) == []


def test_strategies_are_compared(mpirun: JobRunner, tmp_path: Path) -> None:
    only = "mirrored;central storage;1 spare replica;1 server, sync;1 server, async"
    args = ["--only", only, "--epochs", "2", "--row-us", "0", "--hidden", "16", "--json", tmp_path / "r.json"]
    job = mpirun(3, ["-m", "benchmarks.strategies", *args], timeout=90)
    assert job.returncode == 0, job.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    runs = {each["variant"]: each for each in result["runs"] if not each["slow"]}
    assert set(runs) == set(only.split(";"))
    assert len(result["runs"]) == 2 * len(runs)
    steps = 15
    assert {each["megabytes"] for each in result["runs"]} == {None}, "one host sends nothing"
    assert sum(runs["1 server, async"]["staleness"]) == 2 * 2 * steps
    for each in result["runs"]:
        assert each["accuracy"] > 0.2  # guessing gives 0.1
        assert each["variant"] in job.stdout


# Peers


CALLS = "-n 3 -w 1 -b 4K -e 4K --cold"
TOGETHER = "-o avg --backends shared --also first.json --json second.json --plot peers.svg --html peers.html"


@pytest.mark.parametrize("peers", ["mpi4py,openmpi", pytest.param("all", marks=pytest.mark.expensive)])
def test_peers_with_cold_caches_beside_another_job(tmp_path: Path, peers: str) -> None:
    """A run of other calls or ranks is not merged: rank 0, which alone reads the file, says so in one line."""
    pytest.importorskip("matplotlib")
    other = made_run(4)
    other.compress = "bfloat16"
    (tmp_path / "other.json").write_text(to_json(other))
    given = "-o avg --backends native --json first.json", "--backends shared --also other.json"
    lines: list[Program] = [
        ("benchmarks.bandwidth", f"{CALLS} {line}".split(), tmp_path)
        for line in (*given, f"{TOGETHER} --peers {peers}")
    ]
    outcomes = in_one_job(2, lines, tmp_path, timeout=150)
    codes, (_, refused, (job, _)) = [[rank["code"] for rank in ranks] for ranks in outcomes], outcomes
    assert codes == [[0, 0], [2, 2], [0, 0]], outcomes
    has = "it has float32 sum, compress=bfloat16, 4 ranks on 1 node, and this run float32 sum, compress=None, 2 ranks"
    assert "".join(rank["stderr"] for rank in refused).count(has) == 1, refused
    run = load(tmp_path / "second.json")
    backends = {"shared", "mpi4py", "openmpi", f"native ({run.machine['mpi']})"}
    if peers == "all":
        backends |= {"gloo"}
        assert set(PEERS) == set(run.skipped) | (set(PEERS) & set(run.backends()))
    assert backends <= set(run.backends())
    assert {result.wrong for result in run.results} == {0}
    for backend in run.backends():
        memories = {result.memory for result in run.results if result.backend == backend}
        assert {memory + COLD for memory in memories if not memory.endswith(COLD)} < memories
    table = job["stdout"][job["stdout"].index("# median us") :]
    assert all(f"# left out: {name}: " in job["stdout"] for name in run.skipped)
    assert all(title in table for title in ("# p99 us", "# of the limit (memory)"))
    assert sum(line.split()[1:2] == ["shared"] for line in table.splitlines()) == 3 * 4  # memories x caches
    assert (tmp_path / "peers.svg").read_bytes().startswith(b"<?xml")
    assert "shared" in (tmp_path / "peers.html").read_text()


class Whole(MPI.Intracomm):
    """A communicator that can't be duplicated."""

    def Dup(self, *_: Any) -> Any:  # noqa: N802
        pytest.fail("duplicated")


@pytest.mark.parametrize("peer", ["mpi4py", "openmpi"])
def test_a_dtype_is_refused_before_there_are_communicators(peer: str) -> None:
    if peer == "openmpi" and MPI.get_vendor()[0] != "Open MPI":
        pytest.skip("it needs Open MPI")
    world: Any = Whole(MPI.COMM_SELF)
    topology: Any = SimpleNamespace(world=world, size=1, private=world.Dup)
    with pytest.raises(OptionError, match="it has no float16"):
        PEERS[peer](topology, "sum", np.dtype("float16"), 1)


def test_of_several_jobs_the_fastest_result_of_a_call_is_kept() -> None:
    run, slow, fast = made_run(2), made_run(2, slower=3.0), made_run(2, slower=0.5)
    before = len(run.results)
    merge(run, [slow, fast])
    assert len(run.results) == 2 * before
    (kept,) = (each for each in run.of("foreign") if each.backend == "ring (Open MPI v0)" and each.size == 8)
    assert kept.time_us == pytest.approx(10.0, rel=0.01)
    assert sum(line.split()[1:2] == ["ring"] for line in comparison(run)) == 2 * 4  # no limit was measured


# Compression


NETWORK = """\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs (and five more)    |bytes packets errs (and five more)
    lo:  500       5    0    0    0     0          0         0      500       5    0    0    0     0       0          0
  eth0: 1000       7    0    0    0     0          0         0       70       9    0    0    0     0       0          0
  ib0:2000 8 0 0 0 0 0 0 4 2 0 0 0 0 0 0
"""


def test_the_bytes_of_all_interfaces_but_the_loopback_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "dev"
    path.write_text(NETWORK)
    assert hosts.interface_bytes(str(path)) == 74
    assert hosts.interface_bytes() >= 0


METHODS = ["none", "bfloat16", "float16", "int8", "exact"]
NOT_COMPRESSED = {
    "--methods none,int9": "did you mean 'int8'?",
    "--size 3": "one element has 4 bytes",
    "sped": "invalid choice: 'sped'",
}


@pytest.mark.jobs
def test_calls_are_measured_or_refused(tmp_path: Path) -> None:
    given = [f"--size 64K --iters 2 --methods {','.join(METHODS)} --json speed.json", *NOT_COMPRESSED]
    lines = [("benchmarks.compression", line.split(), str(tmp_path)) for line in given]
    measured, *others = in_one_job(2, lines, tmp_path, timeout=180)
    assert [rank["code"] for rank in measured] == [0, 0], measured
    found = json.loads((tmp_path / "speed.json").read_text())
    costs = {cost["method"]: cost for cost in found["costs"]}
    assert list(costs) == METHODS
    assert costs["none"]["speedup"] == 1.0
    errors = [costs[name]["error"] for name in ("exact", "none", "float16", "bfloat16")]
    assert errors == sorted(errors)
    assert errors[1] < 1e-6 < errors[2] < errors[3] < 0.01
    assert costs["bfloat16"]["error"] < costs["int8"]["error"] < 0.1
    assert costs["int8"]["error_of_mean"] < costs["int8"]["error"] / 4, "error feedback"
    assert {cost["bytes_per_rank"] for cost in found["costs"]} == {None}, "one host sends nothing"
    assert found["node_sizes"] == [2]
    for complaint, ranks in zip(NOT_COMPRESSED.values(), others, strict=True):
        assert [rank["code"] for rank in ranks] == [2, 2], ranks
        told = "".join(rank["stderr"] for rank in ranks)
        assert complaint in told
        assert "Traceback" not in told


def test_refused_methods_of_training() -> None:
    training = pytest.importorskip("benchmarks.compressing.training")
    for name, complaint in {
        "sync": "write the number of steps between averages, as in sync:50",
        "diloco:0": "write the number of steps between averages, as in diloco:50",
        "int9": "did you mean 'int8'?",
        "int8+streamed": "streamed fragments need sync:N or diloco:N with a multiple of --every 5",
        "sync:12+streamed": "a multiple of --every 5",
        "ddp+int8": "use ddp+ fp16, powersgd:4 or postlocal:50",
        "ddp+fp16+postlocal:10": "PyTorch's post-local SGD has no compression",
    }.items():
        with pytest.raises(OptionError, match=re.escape(complaint)):
            training.parse(name, 5)


def test_a_model_of_training_that_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert compression.main(["training", "--models", "mpl"]) == 2
    assert "--models mpl is unknown; use mlp or conv" in capsys.readouterr().err


def test_the_target_is_reached_by_two_evaluations_in_a_row() -> None:
    training = pytest.importorskip("benchmarks.compressing.training")

    def run(method: str, accuracies: list[float], seconds: float, sent: int) -> Any:
        found = training.Run(method)
        for accuracy in accuracies:
            found.add(5, seconds, sent, accuracy)
        return found

    plain = run("none", [0.5, 0.955, 0.94, 0.94, 0.95, 0.96, 0.955], 20.0, 1000)
    target = training.target_of(plain)
    assert target == pytest.approx(0.949 - 0.005)
    assert plain.look(target)
    fast = run("int8", [0.95, 0.9, 0.95, 0.95], 2.0, 250)
    assert fast.look(target)
    row = training.row(fast, plain)
    assert (row["seconds_to_target"], row["steps_to_target"], row["speedup"]) == (6.0, 15, 100.0 / 6.0)
    assert (row["bytes_per_step"], row["of_bytes"]) == (50.0, 0.25)
    short = run("ddp", [0.5, 0.95, 0.5], 2.0, 250)
    assert not short.look(target)
    assert training.line(training.row(short, plain)).split()[:5] == ["ddp", "not", "-", ">", "15"]


@pytest.mark.jobs
@pytest.mark.expensive
def test_trainings_are_timed(mpirun: JobRunner, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = tmp_path / "training.json"
    methods = ["powersgd:4", "sync:4+streamed+int8", "ddp+powersgd:4", "ddp+postlocal:2"]
    options = ["--models", "conv", "--steps", "4", "--every", "2", "--methods", ",".join(methods)]
    job = mpirun(2, ["-m", "benchmarks.compression", "training", *options, "--json", record], timeout=180)
    assert job.returncode == 0, job.stderr
    (found,) = json.loads(record.read_text())["models"]
    runs = {run["method"]: run for run in found["runs"]}
    assert list(runs) == ["none", *methods]
    assert runs["none"]["at"] == [2, 4]
    assert all(0 < run["best_accuracy"] <= 1 and run["seconds"][0] > 0 for run in found["runs"])
    assert {run["bytes_per_step"] for run in found["runs"]} == {None}, "one host sends nothing"
