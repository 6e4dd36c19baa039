"""Benchmarks beside other software: peers that are installed, cold caches, and jobs with another MPI library."""

from pathlib import Path

import pytest

from benchmarks.lib.peers import PEERS
from benchmarks.lib.results import COLD, load, merge
from benchmarks.lib.table import comparison
from tests.conftest import JobRunner

from .made_runs import made_run

MODULE = ["-m", "benchmarks.bandwidth", "-n", "3", "-w", "1", "-b", "4K", "-e", "4K", "--cold"]


def test_peers_with_cold_caches_beside_another_job(mpirun: JobRunner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second, picture = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "peers.svg"
    job = mpirun(2, [*MODULE, "--backends", "native", "--json", first])
    assert job.returncode == 0, job.stderr
    job = mpirun(2, [*MODULE, "--backends", "shared", "--peers", "--also", first, "--json", second, "--plot", picture])
    assert job.returncode == 0, job.stderr
    run = load(second)
    mpi = run.machine["mpi"]
    assert {"shared", "mpi4py", "openmpi", f"native ({mpi})"} <= set(run.backends())
    assert set(PEERS) == set(run.skipped) | (set(PEERS) & set(run.backends()))
    assert {result.wrong for result in run.results} == {0}
    for backend in run.backends():
        memories = {result.memory for result in run.results if result.backend == backend}
        assert {memory + COLD for memory in memories if not memory.endswith(COLD)} < memories
    table = job.stdout[job.stdout.index("# median us") :]
    assert all(f"# left out: {name}: " in job.stdout for name in run.skipped)
    assert all(title in table for title in ("# p99 us", "# of the limit (memory)"))
    assert sum(line.split()[0] == "shared" for line in table.splitlines() if line) == 3 * 4  # memories x caches
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_run_of_other_arrays_is_not_merged(mpirun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("{}")
    job = mpirun(2, [*MODULE, "--backends", "shared", "--also", tmp_path / "none.json"])
    assert job.returncode == 2
    assert job.stderr.count("error: --also: ") == 1


def test_of_several_jobs_the_fastest_result_of_a_call_is_kept() -> None:
    run, slow, fast = made_run(2), made_run(2, slower=3.0), made_run(2, slower=0.5)
    before = len(run.results)
    merge(run, [slow, fast])
    assert len(run.results) == 2 * before
    (kept,) = (each for each in run.of("foreign") if each.backend == "ring (Open MPI v0)" and each.size == 8)
    assert kept.time_us == pytest.approx(10.0, rel=0.01)
    assert sum(line.split()[:1] == ["ring"] for line in comparison(run)) == 2 * 4  # no limit was measured
