"""What became of a run: did those left survive, in what time, with what lost, and is the result right?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.injecting import model, notes
from benchmarks.injecting.jobs import Ended
from benchmarks.injecting.kinds import KINDS
from benchmarks.injecting.plans import EPOCHS, Plan

OUTCOMES = ("survived", "told", "hung", "wrong", "ended")
GOOD = ("survived", "told", "quiet")
TOLERANCE = 1e-5  # of parameters, which are about 0.1: one batch left out, or done twice, changes them by 1e-3 or more
ACCURACY = 0.011  # two of the rows that are tested


@dataclass
class Injected:
    """One fault that happened. seconds: until the last survivor had finished a step, or call, without the lost rank."""

    number: int
    name: str
    outcome: str
    seconds: float | None = None


@dataclass
class Judged:
    """outcome: one of OUTCOMES, or "quiet" when no fault came to happen. redone: steps that were done again."""

    plan: Plan
    outcome: str
    why: str
    seconds: float
    redone: int = 0
    faults: list[Injected] = field(default_factory=list)


def judge(plan: Plan, ended: Ended, folder: Path) -> Judged:
    """Look at all that a job has left behind."""
    ranks = [notes.read(folder, rank) for rank in range(plan.ranks)]
    when = dict(ended.sent)
    for mine in ranks:
        when |= {note["number"]: note["time"] for note in mine if note["what"] == "fault"}
    for number, time in list(when.items()):
        if _had_ended(ranks[plan.faults[number].rank], time):
            del when[number]
    lost = {plan.faults[number].rank for number in when if plan.faults[number].kind == "kill"}
    left = [rank for rank in range(plan.ranks) if rank not in lost]
    outcome, why = _outcome(plan, ended, folder, ranks, left)
    if outcome == "survived" and not when:
        outcome = "quiet"
    survivors = [ranks[rank] for rank in left]
    redone = max((_redone(mine) for mine in survivors), default=0)
    return Judged(plan, outcome, why, ended.seconds, redone, _faults(plan, when, survivors, outcome))


def _had_ended(mine: Sequence[dict[str, Any]], time: float) -> bool:
    """Whether a signal came too late: the rank was through with everything."""
    return any(note["what"] == "end" and note["time"] < time for note in mine)


def _outcome(
    plan: Plan, ended: Ended, folder: Path, ranks: list[list[dict[str, Any]]], left: list[int]
) -> tuple[str, str]:
    if "WrongSumError" in ended.printed:
        return "wrong", "a sum was wrong"
    if ended.code is None:
        return "hung", f"nothing happened any more; {ended.seconds:.0f} s in all"
    for fault in plan.faults:
        wanted = KINDS[fault.kind].words
        if wanted and not re.search(wanted.format(rank=fault.rank), ended.printed):
            return "ended", f"exit code {ended.code}, and nobody said {wanted.format(rank=fault.rank)!r}"
    ending = [KINDS[fault.kind] for fault in plan.faults if KINDS[fault.kind].ends]
    if ending:
        seen = ended.code or ending[0].silent
        return ("told", "") if seen else ("ended", "exit code 0 after a fault that ends the job")
    ends = {rank: note for rank in left for note in ranks[rank] if note["what"] == "end"}
    if missing := [rank for rank in left if rank not in ends]:
        return "ended", f"rank {missing[0]} did not come to its end; exit code {ended.code}"
    if ended.code:
        return "ended", f"exit code {ended.code}"
    wrong = "" if plan.program == "calls" else _wrong(plan, folder, ends)
    return ("wrong", wrong) if wrong else ("survived", "")


def _wrong(plan: Plan, folder: Path, ends: dict[int, dict[str, Any]]) -> str:
    """What is wrong with the results of those that are left; "" for nothing."""
    right, accuracy = model.without_faults(plan)
    found = {rank: np.load(folder / f"parameters.{rank}.npy") for rank in ends}
    first = next(iter(ends))
    for rank, end in ends.items():
        if not np.array_equal(found[rank], found[first]) or len(set(end["hashes"])) > 1:
            return f"the parameters of rank {rank} and of rank {first} differ"
        if end["size"] != len(end["hashes"]):
            return f"rank {rank} has {end['size']} ranks and {len(end['hashes'])} hashes"
        if end["epochs"] != EPOCHS:
            return f"the history of rank {rank} has {end['epochs']} epochs, not {EPOCHS}"
        if max(abs(end["accuracy"] - accuracy), abs(end["predicted"] - accuracy)) > ACCURACY:
            return f"accuracy {end['accuracy']:.3f}, predicted {end['predicted']:.3f}, without faults {accuracy:.3f}"
    apart = float(np.abs(found[first] - right).max())
    return "" if apart < TOLERANCE else f"parameters are up to {apart:.2g} from those of a training without faults"


def _redone(mine: Sequence[dict[str, Any]]) -> int:
    steps = [note["step"] for note in mine if note["what"] == "step"]
    return sum(max(0, before - after + 1) for before, after in pairwise(steps))


def _faults(plan: Plan, when: dict[int, float], survivors: list[list[dict[str, Any]]], outcome: str) -> list[Injected]:
    """Every fault that happened, in order; those behind which the others went on have been survived."""
    found = []
    for place, (number, time) in enumerate(sorted(when.items(), key=lambda item: item[1])):
        fault = plan.faults[number]
        seconds = _seconds(survivors, time, plan.ranks - place - 1)
        name = f"{fault.kind}: {fault.point}"
        found.append(
            Injected(number, name, outcome if place == len(when) - 1 or seconds is None else "survived", seconds)
        )
    return found


def _seconds(survivors: list[list[dict[str, Any]]], time: float, size: int) -> float | None:
    """From a loss to when all survivors had finished something on the ranks that were left."""
    firsts = [
        next((note["time"] for note in mine if note["time"] > time and note.get("size", size + 1) <= size), None)
        for mine in survivors
    ]
    known = [first for first in firsts if first is not None]
    return max(known) - time if known and len(known) == len(firsts) else None
