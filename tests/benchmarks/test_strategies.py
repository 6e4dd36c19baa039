"""benchmarks.strategies: its table, its picture, and one run of it."""

import json
from pathlib import Path

import pytest

from benchmarks.strategies import VARIANTS, lineup, spread
from tests.conftest import JobRunner


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
    steps = 15
    assert {each["megabytes"] for each in result["runs"]} == {None}, "one host sends nothing"
    assert sum(runs["1 server, async"]["staleness"]) == 2 * 2 * steps
    for each in result["runs"]:
        assert each["accuracy"] > 0.2  # guessing gives 0.1
        assert each["variant"] in job.stdout
