"""Searches: ranks, parts and jobs that are killed, the command, and the study in one process with its locks."""

import fcntl
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JobRunner, Program, in_one_job
from trainers.apps.search import study
from trainers.apps.search.study import COMPLETE, FAIL, MOST_ATTEMPTS, Claim, Study
from trainers.errors import ArgumentError
from trainers.replicas.numpy.categories import load_network

optuna = pytest.importorskip("optuna")
TELLS, FINISHED = 6, {1, 2, 3}  # of optuna's journal: the operation that sets a trial's state; complete, pruned, fail


def told(journal: Path) -> Counter[int]:
    """Return how often each trial in a journal was told."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    found = Counter({each["trial_id"]: 0 for each in lines if "trial_id" in each})
    found.update(each["trial_id"] for each in lines if each["op_code"] == TELLS and each["state"] in FINISHED)
    return found


def searched(mpirun: JobRunner, journal: Path, ranks_per_trial: int, who: str, **options: Any) -> dict[str, Any]:
    ended = mpirun(2, ["-m", "tests.apps.search_job", "objective", journal, str(ranks_per_trial), who], **options)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("ranks_per_trial", "who"), [(2, "0"), (1, "1")], ids=["a rank of a part", "a whole part"])
def test_a_lost_rank_costs_the_trial_of_its_part(
    mpirun: JobRunner, tmp_path: Path, ranks_per_trial: int, who: str
) -> None:
    journal = tmp_path / "journal"
    result = searched(mpirun, journal, ranks_per_trial, who, ulfm=True)
    assert result["ranks"] == 1
    trials = result["trials"]
    assert [each["number"] for each in trials] == list(range(6))
    failed = [each for each in trials if each["state"] != "COMPLETE"]
    assert [(each["state"], each["reason"]) for each in failed] == [("FAIL", "a rank of its part was lost")]
    after = [each["ranks"] for each in trials if each["number"] > failed[0]["number"]]
    assert after == [[1 - int(who)]] * len(after)
    assert after
    assert set(told(journal).values()) == {1}


def test_a_killed_job_goes_on(mpirun: JobRunner, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ended = mpirun(2, ["-m", "tests.apps.search_job", "objective", journal, "1", "0,1"])
    assert ended.returncode != 0
    running = sorted(number for number, count in told(journal).items() if count == 0)
    assert running
    with journal.open("ab") as file:
        file.write(b'{"op_code": 6, "wor')  # the line that a killed process was writing
    trials = searched(mpirun, journal, 2, "nobody")["trials"]
    assert [each["number"] for each in trials if each["state"] == "FAIL"] == running
    assert {trials[number]["reason"] for number in running} == {"its job was ended"}
    repeats = [each for each in trials if each["repeats"] is not None]
    assert [each["repeats"] for each in repeats] == running
    assert [each["params"]["x"] for each in repeats] == [trials[number]["params"]["x"] for number in running]
    assert len(trials) == 6 + len(running)  # a repeat does not count
    assert set(told(journal).values()) == {1}


PARAMS = "params:\n- {parameterName: lr, type: DOUBLE, minValue: 0.001, maxValue: 0.1, scaleType: UNIT_LOG_SCALE}\n"


def command(mpirun: JobRunner, folder: Path, ranks: int, tuning: str, *given: str, **options: Any) -> dict[str, Any]:
    """Run the command on iris with tests.apps.search_job; returns its JSON. given: the job's own arguments."""
    (folder / "tuning.yaml").write_text(f"goal: MAXIMIZE\n{tuning}{PARAMS}")
    own = ["--config", "tuning.yaml", "--data", "iris", "--storage", "journal", "--json", "s.json", "--epochs", "6"]
    ended = mpirun(ranks, ["-m", "tests.apps.search_job", "command", *given, *own], cwd=folder, **options)
    assert ended.returncode == 0, ended.stderr
    assert "last bits may" not in ended.stderr  # of checkpoints of other numbers of ranks
    return json.loads((folder / "s.json").read_text())  # type: ignore[no-any-return]


def test_a_rank_that_is_lost_in_a_fit_costs_one_trial(mpirun: JobRunner, tmp_path: Path) -> None:
    given = ["SIGKILL", "1", "2", str(tmp_path / "sent"), "--ranks-per-trial", "2"]
    result = command(mpirun, tmp_path, 4, "maxTrials: 4\nenableTrialEarlyStopping: false\n", *given, ulfm=True)
    assert sorted(each["state"] for each in result["trials"]) == ["COMPLETE"] * 3 + ["FAIL"]
    assert [each["reason"] for each in result["trials"] if each["state"] == "FAIL"] == ["a rank of its part was lost"]
    assert result["ranks"] == 3
    assert set(told(tmp_path / "journal").values()) == {1}


def test_a_search_goes_on_after_sigterm(mpirun: JobRunner, tmp_path: Path) -> None:
    """One rank gets it; a later job, on other ranks, repeats the trials that ran."""
    tuning = "maxTrials: 12\nenableTrialEarlyStopping: false\n"
    given = ["SIGTERM", "1", "2", str(tmp_path / "sent")]
    with pytest.raises(AssertionError, match="SIGTERM: the search has been stopped; a search with the same file"):
        command(mpirun, tmp_path, 2, tuning, *given)
    assert 0 in told(tmp_path / "journal").values()
    result = command(mpirun, tmp_path, 3, tuning, *given)
    assert sum(each["repeats"] is None for each in result["trials"]) == 12
    assert {each["state"] for each in result["trials"]} == {"COMPLETE", "FAIL"}
    assert result["ranks"] == 3
    assert set(told(tmp_path / "journal").values()) == {1}


# The command


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


# The study in one process


def test_a_claim_as_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a lock is one of fcntl: a shared one needs a file that is read, the other one a file that is written."""
    unfit: list[int] = []

    def flock(file: io.FileIO | int, kind: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_WRONLY if kind & fcntl.LOCK_SH else os.O_RDONLY) or kind in unfit:
            raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(study.fcntl, "flock", flock)
    path = str(tmp_path / "journal")
    Claim(path, first=True).close()
    unfit.append(fcntl.LOCK_SH)
    with pytest.raises(ArgumentError, match="journal can't be used: Bad file descriptor"):
        Claim(path, first=True)


def test_a_grid_goes_on_with_a_trial_that_was_killed(tmp_path: Path) -> None:
    def opened() -> Study:
        sampler = optuna.samplers.GridSampler({"x": [1, 2]}, seed=0)
        return Study(str(tmp_path / "journal"), ["minimize"], sampler=sampler)

    first = opened()
    asked = [first.ask(2), first.ask(2)]
    values = [each.suggest_int("x", 1, 2) for each in asked]
    first.tell(0, COMPLETE, [1.0])
    again = opened()
    again.begin("")
    assert again.end_running("killed", again=True) == [1]
    repeat = again.ask(2)
    assert repeat.suggest_int("x", 1, 2) == values[1]
    assert again.tell(repeat.number, COMPLETE, [2.0]).repeats == 1
    assert again.ask(2) is None


def test_a_search_of_all_points_ends(tmp_path: Path) -> None:
    """Of two parts: the second one runs no more trials when the first one has tried all points."""
    sampler = optuna.samplers.GridSampler({"x": [1, 2], "y": [1, 2]}, seed=0)
    studies = [Study(str(tmp_path / "journal"), ["minimize"], sampler=sampler) for _ in range(2)]
    points = []
    for number in range(4):
        asked = studies[0].ask(9)
        points.append((asked.suggest_int("x", 1, 2), asked.suggest_int("y", 1, 2)))
        studies[0].tell(number, COMPLETE, [1.0])
    assert sorted(points) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [study.ask(9) for study in studies] == [None, None]


def test_a_trial_that_is_killed_too_often_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for attempt in range(MOST_ATTEMPTS + 1):
        opened = Study(str(path), ["minimize"], sampler=optuna.samplers.RandomSampler())
        opened.begin("")
        assert opened.end_running("killed", again=True) == ([attempt - 1] if attempt else [])
        asked = opened.ask(1)
        if asked is not None:
            asked.suggest_float("x", 0, 1)
    assert asked is None
    assert {(each.state, each.reason) for each in opened.ended()} == {(FAIL, "killed")}
    assert len(opened.ended()) == MOST_ATTEMPTS
