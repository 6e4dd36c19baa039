"""python -m trainers search: what it writes, and the errors that come before anything starts."""

import json
from pathlib import Path

import pytest

from tests.conftest import Program, in_one_job
from trainers.replicas.numpy.categories import load_network

pytest.importorskip("optuna")

TUNING = """
goal: MAXIMIZE
maxTrials: 3
params:
- {parameterName: lr, type: DOUBLE, minValue: 0.001, maxValue: 0.1, scaleType: UNIT_LOG_SCALE}
- {parameterName: units, type: INTEGER, minValue: 2, maxValue: 9}
- {parameterName: optimizer, type: CATEGORICAL, categoricalValues: [adam, momentum]}
- {parameterName: momentum, type: DOUBLE, minValue: 0.5, maxValue: 0.99}
"""


@pytest.mark.jobs
def test_the_command(tmp_path: Path) -> None:
    """The best model and the trials are written; errors come before anything starts."""

    def line(text: str, *given: str) -> Program:
        path = tmp_path / f"{len(list(tmp_path.glob('*.yaml')))}.yaml"
        path.write_text(text)
        return "trainers.cli.main", ["search", "--config", str(path), "--data", "iris", *given], tmp_path

    reason = "none of 3 trials is complete; the first reason: ArgumentError: "
    cases = [
        (line(TUNING, "--ranks-per-trial", "3"), "a part of 3 ranks: this job has 2 ranks"),
        (line(TUNING.replace("goal", "gaol")), "gaol: Extra inputs are not permitted"),
        (line(TUNING, "--units", "3"), "--units is varied by --config; leave it out here"),
        (line(TUNING, "--storage", "none/journal"), "--storage none/journal: this can't be written"),
        (line(TUNING, "--strategy", "spare_replicas"), f"{reason}--backup-workers 1: spare must be"),
        (line(TUNING, "--epochs", "0"), f"{reason}--epochs 0"),
    ]
    files = ["--save", "best.npz", "--json", "s.json", "--storage", "s.journal"]
    programs = [*(program for program, _ in cases), line(TUNING, "--epochs", "3", *files)]
    *refused, searched = in_one_job(2, programs, tmp_path)
    for (_, text), ranks in zip(cases, refused, strict=True):
        assert [each["code"] for each in ranks] == [2, 2], ranks
        assert text in ranks[0]["stderr"], ranks[0]["stderr"]
    assert [each["code"] for each in searched] == [0, 0], searched
    result = json.loads((tmp_path / "s.json").read_text())
    assert [each["number"] for each in result["trials"]] == [0, 1, 2]
    assert {each["state"] for each in result["trials"]} <= {"COMPLETE", "PRUNED"}
    best = result["trials"][result["best"]]
    assert best["values"] == [max(each["values"][0] for each in result["trials"] if each["values"])]
    network = load_network(str(tmp_path / "best.npz"))
    options = result["best_options"]
    assert options == best["params"]
    assert network.sizes == [4, options["units"], 3]
    assert network.optimizer.lr == pytest.approx(options["lr"])
    assert ("momentum" in options) == (options["optimizer"] == "momentum")
    assert 0.5 <= options.get("momentum", 0.5) <= 0.99
    lines = "".join(each["stdout"] for each in searched).splitlines()
    assert sum(line.startswith("trial ") for line in lines) == 3
    assert any(line.startswith("test accuracy of the best model: ") for line in lines)
