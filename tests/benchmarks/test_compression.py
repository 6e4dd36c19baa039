"""benchmarks.compression: its tables, and small runs; test_cluster_sim.py has one on simulated hosts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from allreduce.errors import OptionError
from benchmarks import compression
from benchmarks.lib import hosts
from tests.conftest import JobRunner, in_one_job

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
REFUSED = {
    "--methods none,int9": "did you mean 'int8'?",
    "--size 3": "one element has 4 bytes",
    "sped": "invalid choice: 'sped'",
}


@pytest.mark.jobs
def test_calls_are_measured_or_refused(tmp_path: Path) -> None:
    given = [f"--size 64K --iters 2 --methods {','.join(METHODS)} --json speed.json", *REFUSED]
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
    for complaint, ranks in zip(REFUSED.values(), others, strict=True):
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
