"""python -m trainers search: what it writes, and the errors that come before anything starts."""

import json
from pathlib import Path

import pytest

from tests.conftest import JobRunner, in_one_job
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


def test_the_best_model_and_the_trials_are_written(mpirun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "tuning.yaml").write_text(TUNING)
    files = ["--save", "best.npz", "--json", "s.json", "--storage", "s.journal"]
    options = ["--config", "tuning.yaml", "--data", "iris", "--epochs", "3"]
    ended = mpirun(2, ["-m", "trainers", "search", *options, *files], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
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
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("trial ") for line in lines) == 3
    assert any(line.startswith("test accuracy of the best model: ") for line in lines)


@pytest.mark.jobs
def test_errors_before_anything_starts(tmp_path: Path) -> None:
    def lines(text: str, *given: str) -> tuple[str, list[str], str]:
        number = len(list(tmp_path.glob("*.yaml")))
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        return "trainers.cli.main", ["search", "--config", str(path), "--data", "iris", *given], str(tmp_path)

    reason = "none of 3 trials is complete; the first reason: ArgumentError: "
    cases = [
        (lines(TUNING, "--ranks-per-trial", "3"), "a part of 3 ranks: this job has 2 ranks"),
        (lines(TUNING.replace("goal", "gaol")), "gaol: Extra inputs are not permitted"),
        (lines(TUNING, "--units", "3"), "--units is varied by --config; leave it out here"),
        (lines(TUNING, "--storage", "none/journal"), "--storage none/journal: this can't be written"),
        (lines(TUNING, "--strategy", "spare_replicas"), f"{reason}--backup-workers 1: spare must be"),
        (lines(TUNING, "--epochs", "0"), f"{reason}--epochs 0"),
    ]
    outcomes = in_one_job(2, [line for line, _ in cases], tmp_path)
    for (_, text), ranks in zip(cases, outcomes, strict=True):
        assert [each["code"] for each in ranks] == [2, 2], ranks
        assert text in ranks[0]["stderr"], ranks[0]["stderr"]
