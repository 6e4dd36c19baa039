"""The benchmarks' command lines, run under mpirun: whole runs, and everything that they refuse."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import launch
import pytest
from conftest import JobRunner

from benchmarks.results import load

QUICK = ["-n", "3", "-w", "1"]
MODULE = ["-m", "benchmarks.bandwidth"]


@pytest.fixture
def quiet() -> dict[str, str]:
    """No table of this user."""
    return {"ALLREDUCE_TABLE": ""}


@pytest.mark.parametrize("mpi", launch.MPIS)
def test_every_backend_and_every_output(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str], mpi: str) -> None:
    files = {option: tmp_path / f"run.{option}" for option in ("json", "csv")}
    outputs = [part for option, path in files.items() for part in (f"--{option}", path)]
    sweep = ["-b", "4", "-e", "256K", "-f", "256"]
    job = mpirun(2, [*MODULE, *sweep, *QUICK, *outputs, "--peers", "mpi4py"], mpi=mpi, env=quiet)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert "# Out of bounds values : 0 OK" in lines
    assert any("wins" in line for line in lines)
    run = load(files["json"])
    assert {"ring", "halving_doubling", "reduce_to_one", "shared", "native", "auto", "mpi4py"} <= set(run.backends())
    assert {result.size for result in run.results} == {4, 1024, 262144}
    assert {(result.wrong, result.iterations) for result in run.results} == {(0, 3)}
    assert all(0 < result.min_us <= result.time_us <= result.p99_us for result in run.results)
    rows = [line for line in lines if not line.startswith("#")]
    assert len(rows) == len({(result.size, result.backend) for result in run.results})
    assert len(list(csv.DictReader(files["csv"].open()))) == len(run.results)
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_peers_pictures_and_simulated_nodes(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str]) -> None:
    for module in ("torch", "matplotlib", "plotly"):
        pytest.importorskip(module)
    outputs = ["--plot", tmp_path / "p.png", "--html", tmp_path / "p.html", "--json", tmp_path / "p.json"]
    options = ["--peers", "gloo", "--ranks-per-node", "2,1", "-d", "double", "-o", "avg", "-b", "8K", "-e", "8K"]
    job = mpirun(3, [*MODULE, *QUICK, *options, *outputs], env=quiet)
    assert job.returncode == 0, job.stderr
    run = load(tmp_path / "p.json")
    assert (run.node_sizes, run.simulated, run.dtype, run.op) == ([2, 1], True, "float64", "mean")
    assert {"gloo", "hierarchical_copy"} <= set(run.backends())
    assert "shared" in run.skipped
    assert {result.wrong for result in run.results} == {0}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "hierarchical_copy" in (tmp_path / "p.html").read_text()


def test_one_rank_works_and_says_that_it_means_nothing(mpirun: JobRunner, quiet: dict[str, str]) -> None:
    job = mpirun(1, [*MODULE, *QUICK, "-b", "64", "-e", "64"], env=quiet)
    assert job.returncode == 0, job.stderr
    assert "One rank only: there is nothing to reduce" in job.stdout


def test_wrong_results_are_counted_and_fail_the_run(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str]) -> None:
    """A backend that spoils one element of its result on one rank."""
    script = tmp_path / "spoilt.py"
    script.write_text(
        "import sys\nfrom allreduce.native import Native\nfrom benchmarks import bandwidth\n"
        "plain = Native._reduce\n"
        "def spoil(self, buffer, op):\n"
        "    plain(self, buffer, op)\n"
        "    buffer[buffer.size // 2] += self.rank == 1\n"
        "Native._reduce = spoil\nsys.exit(bandwidth.main())\n"
    )
    job = mpirun(2, [script, *QUICK, "-b", "1K", "-e", "1K", "--backends", "native,ring"], env=quiet)
    assert job.returncode == 1
    assert "# Out of bounds values : 2 FAILED" in job.stdout
    assert "WRONG RESULTS: native, foreign arrays, 1 KiB: 1 elements" in job.stdout
    assert "WRONG RESULTS: ring" not in job.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-b", "12Q"], "'12Q' is not a size"),
        (["-d", "complex64"], "complex64 can't be reduced"),
        (["-o", "median"], "'median' is unknown"),
        (["-n", "0"], "at least 1"),
        (["--ranks-per-node", "0"], "one per node such as 3,1"),
        (["--ranks-per-node", "2,2"], "can't describe 2 ranks"),
        (["--backends", "shard"], "did you mean 'shared'?"),
        (["--backends", "nccl"], "nccl"),
        (["--backends", "native", "-d", "half"], "native does not reduce float16"),
        (["--peers", "glue"], "did you mean 'gloo'?"),
        (["-o", "avg", "-d", "int32"], "not defined for int32"),
        (["-b", "1K", "-e", "8"], "no size between them"),
        (["-e", "100000G", "--backends", "native"], "give a smaller -e"),
        (["--json", "none/run.json"], "the folder none does not exist"),
        (["--csv", "."], "this is a folder"),
        (["--plot", "picture.txt"], ".png"),
        (["--json", "same", "--csv", "same"], "two outputs go to the same file"),
    ],
)
def test_refused_before_measuring(
    mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str], options: list[str], complaint: str
) -> None:
    if options == ["--backends", "nccl"] and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    job = mpirun(2, [*MODULE, *QUICK, *options], env=quiet, cwd=tmp_path)
    assert job.returncode == 2, job.stdout + job.stderr
    assert job.stderr.count("error: ") == 1, job.stderr
    assert complaint in job.stderr
    assert "Traceback" not in job.stderr
    assert job.stdout.count("float") == 0, "it began to measure"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [("--peers=gloo", "torch", "torch"), ("--plot=p.png", "matplotlib", "bench"), ("--html=p.html", "plotly", "bench")],
)
def test_what_is_missing_is_named_with_its_extra(
    mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str], option: str, module: str, extra: str
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / module).mkdir(parents=True)
    (hidden / module / "__init__.py").write_text(f"raise ModuleNotFoundError('no module {module} here')")
    variables = {**quiet, "PYTHONPATH": f"{launch.ROOT}:{hidden}"}
    job = mpirun(2, [*MODULE, *QUICK, "--backends", "native", option], env=variables, cwd=hidden)
    assert job.returncode == 2, job.stdout + job.stderr
    assert f'pip install "allreduce[{extra}]"' in job.stderr
    assert job.stderr.count("error: ") == 1
    assert [path.name for path in hidden.iterdir()] == [module]


def tune(mpirun: JobRunner, ranks: int, path: Any, quiet: dict[str, str], *more: Any) -> Any:
    options = ["--sizes", "1K,256K", "--dtypes", "float", "--output", path, *QUICK, *more]
    return mpirun(ranks, ["-m", "benchmarks.tune", *options], env=quiet)


def test_tune_writes_merges_and_auto_reads(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str]) -> None:
    path = tmp_path / "table.json"
    for ranks, more in ((2, []), (3, ["--ranks-per-node", "2"]), (2, [])):
        job = tune(mpirun, ranks, path, quiet, *more)
        assert job.returncode == 0, job.stderr
    entries = json.loads(path.read_text())["entries"]
    places = [(entry["node_sizes"], entry["simulated"], entry["memory"]) for entry in entries]
    assert sorted(places) == sorted(
        ([*n], s, m) for n, s in (((2,), False), ((2, 1), True)) for m in ("allocated", "foreign")
    )
    script = tmp_path / "use.py"
    script.write_text(
        "import allreduce\nwith allreduce.create('auto') as reduce:\n    reduce(reduce.allocate(999), 'sum')\n"
    )
    used = mpirun(2, [script], env={**quiet, "ALLREDUCE_TABLE": str(path)})
    assert used.returncode == 0, used.stderr
    assert f"measured table {path}" in used.stderr


def test_tune_writes_where_auto_looks(mpirun: JobRunner, tmp_path: Path) -> None:
    options = ["--sizes", "1K", "--dtypes", "float", "--backends", "native,shared", *QUICK]
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    job = mpirun(2, ["-m", "benchmarks.tune", *options], env=cache)
    assert job.returncode == 0, job.stderr
    (table,) = (tmp_path / "allreduce").iterdir()
    script = "import allreduce; allreduce.create('auto').close()"
    assert f"measured table {table}" in mpirun(2, ["-c", script], env=cache).stderr


def test_tune_refuses(mpirun: JobRunner, tmp_path: Path, quiet: dict[str, str]) -> None:
    other = tmp_path / "notes.json"
    other.write_text('{"mine": 1}')
    for job, complaint in (
        (tune(mpirun, 2, other, quiet), "is in the way: it is no decision table"),
        (tune(mpirun, 2, tmp_path / "none" / "t.json", quiet), "does not exist"),
        (tune(mpirun, 2, tmp_path / "t.json", quiet, "--backends", "auto"), "auto"),
        (tune(mpirun, 1, tmp_path / "t.json", quiet), "one rank has nothing to reduce"),
    ):
        assert job.returncode == 2, job.stdout + job.stderr
        assert job.stderr.count("error: ") == 1, job.stderr
        assert complaint in job.stderr
    assert other.read_text() == '{"mine": 1}'
    assert list(tmp_path.iterdir()) == [other]
