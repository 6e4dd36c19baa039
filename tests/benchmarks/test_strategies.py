"""benchmarks.strategies: its table, its picture, and one run of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import strategies
from benchmarks.strategies import VARIANTS, Outcome, lineup, spread
from tests.conftest import JobRunner


def outcome(variant: str, slow: bool = False, **values: float) -> Outcome:
    made = Outcome(variant, slow, 4, 0.2, 75.0, 7000.0, 0.97, (), 0, 10.0, 0)
    return replace(made, **values)  # type: ignore[arg-type]


RUNS = [
    outcome("mirrored", samples_per_second=7000),
    outcome("1 spare replica", samples_per_second=6000, seconds=0.2),
    outcome("1 server, async", samples_per_second=7100, megabytes=24, staleness=(1, 0, 3)),
    outcome("2 servers, async", samples_per_second=5000, megabytes=9, workers=3, busiest=3),
    outcome("1 server, async, scale", accuracy=0.96),
    outcome("mirrored", True, seconds=0.8, updates_per_second=20),
    outcome("1 spare replica", True, seconds=0.22, updates_per_second=70),
    outcome("1 server, async", True, updates_per_second=180),
    outcome("1 server, async, scale", True, accuracy=0.93, updates_per_second=170),
]


def test_the_table_has_a_line_for_each_run() -> None:
    lines = strategies.table(RUNS)
    assert len(lines) == len(RUNS) + 3
    assert lines[1] == "# equal ranks"
    assert lines[4].split()[-6:] == ["1.5", "0", "24.0", "120.0", "rank", "0"]


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


def test_the_picture_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.strategies import draw

    assert draw(RUNS, "a title").startswith(b"\x89PNG")
    assert draw(RUNS[:1], "a title", "svg").startswith(b"<?xml")


@pytest.mark.jobs
def test_a_run(mpirun: JobRunner, tmp_path: Path) -> None:
    only = "mirrored;central storage;1 spare replica;1 server, sync;1 server, async"
    args = ["--only", only, "--epochs", "2", "--row-us", "0", "--hidden", "16", "--json", tmp_path / "r.json"]
    job = mpirun(3, ["-m", "benchmarks.strategies", *args], timeout=90)
    assert job.returncode == 0, job.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    runs = {each["variant"]: each for each in result["runs"] if not each["slow"]}
    assert set(runs) == set(only.split(";"))
    assert len(result["runs"]) == 2 * len(runs)
    steps, parameters = 15, 64 * 16 + 16 + 16 * 10 + 10
    gradients = 4e-6 * parameters * steps  # MB that a worker sends in an epoch; as much comes back
    for name, times in (("mirrored", 2 * 2 * 2 / 3), ("central storage", 4), ("1 server, sync", 4)):
        assert runs[name]["megabytes"] == pytest.approx(times * gradients, rel=0.1), name
    assert sum(runs["1 server, async"]["staleness"]) == 2 * 2 * steps
    for each in result["runs"]:
        assert each["accuracy"] > 0.2  # guessing gives 0.1
        assert each["variant"] in job.stdout


@pytest.mark.jobs
def test_bad_arguments_end_with_one_line(mpirun: JobRunner, tmp_path: Path) -> None:
    job = mpirun(1, ["-m", "benchmarks.strategies", "--json", tmp_path / "r.json"], timeout=30)
    assert job.returncode == 2
    assert job.stderr == "benchmarks.strategies: error: too few ranks for these strategies: 1; start more\n"
