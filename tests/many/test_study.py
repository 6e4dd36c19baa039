"""The study of a search in one process: its locks, and trials that a killed job has left."""

import fcntl
import io
import os
from pathlib import Path

import pytest

from trainers.errors import ArgumentError
from trainers.many import study
from trainers.many.study import COMPLETE, Claim, Study

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
    claim = Claim(path, first=True)
    claim.share()
    claim.close()
    unfit.append(fcntl.LOCK_SH)
    claim = Claim(path, first=True)
    with pytest.raises(ArgumentError, match="journal can't be used: Bad file descriptor"):
        claim.share()
    claim.close()


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
