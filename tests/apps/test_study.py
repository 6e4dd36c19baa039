"""The study of a search in one process: its locks, and trials that a killed job has left."""

import fcntl
import io
import os
from pathlib import Path

import pytest

from trainers.apps.search import study
from trainers.apps.search.study import COMPLETE, FAIL, MOST_ATTEMPTS, Claim, Study
from trainers.errors import ArgumentError

optuna = pytest.importorskip("optuna")


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
