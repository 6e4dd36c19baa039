"""Searches whose ranks, parts and jobs are killed: every trial is told once, and the others go on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JobRunner

pytest.importorskip("optuna")
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
