"""Benchmarks beside other software: peers that are installed, cold caches, and jobs with another MPI library."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from allreduce.errors import OptionError
from benchmarks.lib.peers import PEERS
from benchmarks.lib.results import COLD, from_json, load, merge, to_json
from benchmarks.lib.table import comparison
from tests.conftest import Program, in_one_job

from .made_runs import made_run

CALLS = "-n 3 -w 1 -b 4K -e 4K --cold"
LINES = (
    f"{CALLS} -o avg --backends native --json first.json",
    f"{CALLS} --backends shared --also other.json",
    f"{CALLS} -o avg --backends shared --peers --also first.json --json second.json --plot peers.svg --html peers.html",
)


@pytest.mark.jobs
def test_peers_with_cold_caches_beside_another_job(tmp_path: Path) -> None:
    """A run of other calls or ranks is not merged: rank 0, which alone reads the file, says so in one line."""
    pytest.importorskip("matplotlib")
    other = made_run(4)
    other.compress = "bfloat16"
    assert from_json(to_json(other)) == other
    (tmp_path / "other.json").write_text(to_json(other))
    lines: list[Program] = [("benchmarks.bandwidth", line.split(), tmp_path) for line in LINES]
    outcomes = in_one_job(2, lines, tmp_path, timeout=150)
    codes, (_, refused, (job, _)) = [[rank["code"] for rank in ranks] for ranks in outcomes], outcomes
    assert codes == [[0, 0], [2, 2], [0, 0]], outcomes
    has = "it has float32 sum, compress=bfloat16, 4 ranks on 1 node, and this run float32 sum, compress=None, 2 ranks"
    assert "".join(rank["stderr"] for rank in refused).count(has) == 1, refused
    run = load(tmp_path / "second.json")
    mpi = run.machine["mpi"]
    assert {"shared", "mpi4py", "openmpi", "gloo", f"native ({mpi})"} <= set(run.backends())
    assert set(PEERS) == set(run.skipped) | (set(PEERS) & set(run.backends()))
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


def test_files_of_earlier_versions_have_no_compress() -> None:
    text = to_json(made_run(2))
    old = text.replace(',\n "compress": null', "")
    assert old != text
    assert from_json(old) == from_json(text)


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
