"""The rungs of successive halving, kept in a study's journal. No MPI here.

A trial stays RUNNING in the journal until it loses, fails, or has trained up to the last budget; then it is told, once.
Its attribute RUNGS has a row for each rung that it has ended, BEGUN says which rung it runs. All else follows from
these, so a later job goes on wherever this one ends: the trials of the unfinished rung run, from their checkpoints.

The trials of a search form a bracket, which halves on its own. A later search that asks for more trials begins another
bracket. The attribute BRACKETS of the study has the number of trials of each bracket whose trials are all selected.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainers.many.halving import Halving, divide
from trainers.many.study import (
    BEGUN,
    COMPLETE,
    FAIL,
    MOST_ATTEMPTS,
    PRUNED,
    RUNGS,
    SECONDS,
    WHY,
    Ended,
    Study,
    counted,
    locked,
)

BRACKETS = "brackets"
ATTEMPTS_OF_LOST = 2  # how often a trial begins a rung, if a rank is lost meanwhile
VALUE, TIME = 1, 2  # in a row of RUNGS: budget, value, seconds, ranks
Told = Callable[[Ended], object]


class Begun(NamedTuple):
    """The attribute BEGUN: the bracket of a trial, its rung, how often it began this rung, whether it runs."""

    bracket: int
    rung: int
    attempt: int
    runs: bool


class Phase(NamedTuple):
    """What the parts do until all ranks meet again. JSON types.

    sizes: the ranks of each part. rung: from 0. numbers: the trials that go on, the longest first; each part begins
    with the one at its index. most: how many trials the study then has, new ones included; 0 for no new ones.
    """

    sizes: list[int]
    rung: int
    numbers: list[int]
    most: int


class Rungs:
    """Successive halving of the trials of a study. Used on the first ranks of parts; each opens its own study."""

    def __init__(self, study: Study, path: str, halving: Halving, trials: int) -> None:
        """path: of the journal. trials: how many the study gets."""
        self._study, self._path, self._halving, self._trials = study, path, halving, trials
        self.budgets = halving.budgets

    def folder(self, number: int) -> str:
        """Return the folder of a trial's checkpoints."""
        return f"{self._path}.checkpoints/trial-{number}"

    def made_folder(self, number: int) -> str:
        """Make the folder of a trial's checkpoints, and return it."""
        Path(self.folder(number)).mkdir(parents=True, exist_ok=True)
        return self.folder(number)

    def begin_job(self, why: str) -> list[int]:
        """Mark the trials that a former job ran, so that they run again; return them. why: of those that have run
        too often. Remove all other checkpoints: a trial must not begin with the checkpoints of a removed journal."""
        found, live = [], self._live()
        for trial in live:
            begun = _begun(trial)
            if begun is None:  # killed before it was marked
                self._begin(trial.number, len(self._brackets()), 0, 0, runs=False)
            elif begun.rung == len(_rows(trial)) and self.interrupted(trial.number, why, MOST_ATTEMPTS) is None:
                found.append(trial.number)
        kept = {Path(self.folder(trial.number)).name for trial in live}
        for folder in Path(self.folder(0)).parent.glob("trial-*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        return found

    def interrupted(self, number: int, why: str, most: int = ATTEMPTS_OF_LOST) -> Ended | None:
        """Mark a trial that runs no longer, so that it runs again from its checkpoint. Returns it if it has failed,
        because it has begun its rung `most` times, or never; or if it was told before."""
        trial = self._study.trial(number)
        begun = _begun(trial)
        if begun is None or trial.state.is_finished() or (_runs(trial) and begun.attempt >= most):
            return self.tell(number, FAIL, 0, **{WHY: why})
        if _runs(trial):
            self._begin(number, *begun[:3], runs=False)
        return None

    def stopped(self, number: int) -> None:
        """Mark a trial that SIGTERM has stopped, so that a later job runs it from its checkpoint. This attempt does not
        count: a long rung may need many jobs."""
        begun = _begun(self._study.trial(number))
        assert begun is not None
        self._begin(number, begun.bracket, begun.rung, begun.attempt - 1, runs=False)

    # Between two phases, on the first rank of the search

    def next_phase(self, ranks: int, least: int, most: int | None, lost: str, told: Told) -> Phase | None:
        """Tell the trials that have lost, and return the next phase of the ranks; None if the search has ended.

        ranks, least, most: see `divide`. lost: why a trial has failed whose ranks were lost. told: called with each.
        """
        for trial in self._live():
            if _runs(trial) or BEGUN not in trial.user_attrs:
                if (failed := self.interrupted(trial.number, lost)) is not None:
                    told(failed)
            elif len(_rows(trial)) == len(self.budgets):  # its rank was lost before it told this
                told(self.tell(trial.number, COMPLETE))
        while True:
            bracket = len(self._brackets())
            old = [trial for trial in self._live() if _bracket(trial) < bracket]
            if old:
                rung = min(len(_rows(trial)) for trial in old)
                self._select(bracket - 1, rung, told)
                going = [trial for trial in self._live() if _bracket(trial) < bracket and len(_rows(trial)) == rung]
                if going:
                    return self._phase(going, rung, 0, (ranks, least, most))
                continue
            going = [trial for trial in self._live() if not _rows(trial)]
            missing = 0 if self._study.stopped else max(0, self._trials - counted(self._study.trials()))
            if going or missing:
                return self._phase(going, 0, missing, (ranks, least, most))
            size = sum(_bracket(trial) == bracket for trial in self._study.trials())
            if not size:
                return None
            self._study.set(BRACKETS, [*self._brackets(), size])

    def _phase(self, going: list[Any], rung: int, new: int, ranks: tuple[int, int, int | None]) -> Phase:
        costs = {trial.number: self._cost(trial) for trial in going}
        order = sorted(costs, key=lambda number: (-costs[number], number))
        division = divide([*(costs[number] for number in order), *[1.0] * new], *ranks)
        numbers = order[: division.trials]
        asked = division.trials - len(numbers)
        return Phase(list(division.sizes), rung, numbers, counted(self._study.trials()) + asked if asked else 0)

    def _cost(self, trial: Any) -> float:
        """Return the seconds of one rank that a unit of the budget has cost in the last rung; 1.0 if not known."""
        rows = _rows(trial)
        if not rows:
            return 1.0
        budget, _, seconds, ranks = rows[-1]
        return float(seconds * len(ranks) / (budget - (rows[-2][0] if len(rows) > 1 else 0)))

    def _select(self, bracket: int, rung: int, told: Told) -> None:
        """Tell the trials that do not go on to a rung: all but the best of those that have ended the one before."""
        if not rung:
            return
        sign = -1 if self._study.maximizes else 1
        ended = [trial for trial in self._study.trials() if _bracket(trial) == bracket and len(_rows(trial)) >= rung]
        ended.sort(key=lambda trial: (sign * _rows(trial)[rung - 1][VALUE], trial.number))
        count = self._halving.survivors(self._brackets()[bracket], rung)
        for trial in ended[count:]:
            if not trial.state.is_finished():
                told(self.tell(trial.number, PRUNED))

    # In a phase, on the first rank of each part

    def take(self, phase: Phase, part: int) -> Any:
        """Return optuna's trial that a part runs next, which is then marked as begun; None if there is no other."""
        with locked(f"{self._path}.take"):
            live = {trial.number: trial for trial in self._live()}
            numbers = phase.numbers
            order = [*numbers[part : part + 1], *numbers[len(phase.sizes) :], *numbers]
            for number in order:
                trial = live.get(number)
                begun = None if trial is None else _begun(trial)
                if begun is None or len(_rows(trial)) != phase.rung or _runs(trial):
                    continue
                bracket, rung, attempt, _ = begun
                self._begin(number, bracket, phase.rung, attempt + 1 if rung == phase.rung else 1)
                return self._study.again(number)
            asked = self._study.ask(phase.most) if phase.most else None
            if asked is not None:
                self._begin(asked.number, len(self._brackets()), 0, 1)
            return asked

    def _begin(self, number: int, bracket: int, rung: int, attempt: int, runs: bool = True) -> None:
        self._study.attribute(number, BEGUN, list(Begun(bracket, rung, attempt, runs)))

    def ended(self, number: int, rung: int, value: float, seconds: float, ranks: list[int]) -> Ended | None:
        """Keep a trial's value in a rung; returns the trial if this was the last one."""
        trial = self._study.trial(number)
        if len(_rows(trial)) == rung and not trial.state.is_finished():  # after a loss it may be told again
            budget = self.budgets[rung]
            self._study.report(number, value, budget)
            self._study.attribute(number, RUNGS, [*_rows(trial), [budget, value, round(seconds, 3), ranks]])
        return self.tell(number, COMPLETE) if rung + 1 == len(self.budgets) else None

    def tell(self, number: int, state: str, seconds: float = 0, **attributes: Any) -> Ended:
        """Tell a trial that goes on no longer, and remove its checkpoints. seconds: of a rung that it has not ended.
        attributes: WHY, RANKS."""
        rows = _rows(self._study.trial(number))
        values = [rows[-1][VALUE]] if state == COMPLETE else None
        if seconds:
            attributes[SECONDS] = round(seconds + sum(row[TIME] for row in rows), 3)
        told = self._study.tell(number, state, values, **attributes)
        shutil.rmtree(self.folder(number), ignore_errors=True)
        return told

    def _brackets(self) -> list[int]:
        return list(self._study.get(BRACKETS, []))

    def _live(self) -> list[Any]:
        return [trial for trial in self._study.trials() if trial.state.name == "RUNNING"]


def _rows(trial: Any) -> list[list[Any]]:
    return list(trial.user_attrs.get(RUNGS, []))


def _begun(trial: Any) -> Begun | None:
    row = trial.user_attrs.get(BEGUN)
    return None if row is None else Begun(*row)


def _bracket(trial: Any) -> int:
    begun = _begun(trial)
    return -1 if begun is None else begun.bracket


def _runs(trial: Any) -> bool:
    """Return whether a trial has begun a rung and not ended it."""
    begun = _begun(trial)
    return begun is not None and begun.runs and begun.rung == len(_rows(trial))
