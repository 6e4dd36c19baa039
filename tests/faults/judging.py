"""The verdict on a run: did the remaining ranks survive, how fast, how many steps were repeated, is the result
right?"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults import notes
from tests.faults.jobs import Ended
from tests.faults.plans import ALONE, BATCH, EPOCHS, KINDS, LOSSES, ROWS, TOLD_SECONDS, Fault, Plan

SURVIVED, ORDERLY, HUNG, WRONG, ENDED = OUTCOMES = "survived", "orderly", "hung", "wrong", "ended"
QUIET, FOUND = "quiet", "found"  # no fault came to happen; one that makes the result wrong did, and it was
GOOD = (SURVIVED, ORDERLY, QUIET, FOUND)
TOLERANCE = 1e-5  # of parameters, which are about 0.1: one batch left out, or done twice, changes them by 1e-3 or more
ACCURACY = 0.011  # two of the rows that are tested
ALL = [{"epoch": number} for number in range(1, EPOCHS + 1)]
WORSE = 0.15  # by which the accuracy may be, where the result depends on who is fast

Notes = list[dict[str, Any]]


@dataclass
class Injected:
    """One fault that happened. seconds: until the last remaining rank had finished a step, or a call, without the
    failed rank."""

    name: str
    outcome: str
    seconds: float | None = None


@dataclass
class Judged:
    """The verdict. outcome: one of OUTCOMES, QUIET or FOUND. redone: the number of steps that were repeated."""

    plan: Plan
    outcome: str
    why: str
    redone: int = 0
    faults: list[Injected] = field(default_factory=list)


def judge(plan: Plan, ended: Ended, folder: Path) -> Judged:
    """Judge a job by the files that it has left."""
    ranks = [notes.read(folder, rank) for rank in range(plan.ranks)]
    when = dict(ended.sent)
    for mine in ranks:
        when |= {note["number"]: note["time"] for note in mine if note["what"] == "fault"}
    for number, time in list(when.items()):
        if _had_ended(ranks[plan.faults[number].rank], time):
            del when[number]
    happened = [plan.faults[number] for number in when]
    lost = {fault.rank for fault in happened if fault.kind in LOSSES}
    left = [rank for rank in range(plan.ranks) if rank not in lost]
    outcome, why = _outcome(plan, ended, folder, {rank: ranks[rank] for rank in left}, happened)
    survivors = [ranks[rank] for rank in left]
    redone = max((_redone(mine) for mine in survivors), default=0) if plan.kind.together else 0
    if outcome == SURVIVED and plan.goes_on and plan.kind.again is not None and redone > plan.kind.again * len(lost):
        outcome, why = WRONG, f"{redone} steps were done again after {len(lost)} losses"
    if outcome == SURVIVED and not when:
        outcome = QUIET
    if any(fault.kind == "spoil" for fault in happened):
        outcome = {WRONG: FOUND, SURVIVED: ENDED}.get(outcome, outcome)
    return Judged(plan, outcome, why, redone, _faults(plan, when, survivors, outcome))


def _had_ended(mine: Notes, time: float) -> bool:
    """Whether a signal came too late: the rank had already finished."""
    return any(note["what"] == "end" and note["time"] < time for note in mine)


def _outcome(
    plan: Plan, ended: Ended, folder: Path, left: dict[int, Notes], happened: Sequence[Fault]
) -> tuple[str, str]:
    """Return one of OUTCOMES, and why. left: the notes of the remaining ranks. happened: the faults that happened."""
    if "WrongResultError" in ended.printed:
        return WRONG, "a sum was wrong"
    if ended.code is None:
        return HUNG, f"nothing happened any more; {ended.seconds:.0f} s in all"
    ends = {rank: note for rank, mine in left.items() for note in mine if note["what"] == "end"}
    ending = [fault for fault in happened if KINDS[fault.kind].ends]
    if missing := [fault for fault in happened if not _told(fault, ended.printed)]:
        return ENDED, f"nobody has told of: {missing[0]}: {reason(ended.printed)}"
    if ending:
        left_behind = {each.rank for each in ending if f"rank {each.rank} of the job failed in " in ended.printed}
        seen = ended.code or KINDS[ending[0].kind].silent or len(left_behind | {*ends}) == len(left)
        return (ORDERLY, "") if seen else (ENDED, "exit code 0 after a fault that ends the job")
    if len(ends) < len(left):
        if words := _nobody_could(plan, happened):
            if re.search(words, ended.printed):
                return ORDERLY, ""
            return ENDED, f"exit code {ended.code}, and nobody said {words!r}: {reason(ended.printed)}"
        missed = min(set(left) - set(ends))
        return ENDED, f"rank {missed} did not come to its end; exit code {ended.code}: {reason(ended.printed)}"
    if ended.code:
        return ENDED, f"exit code {ended.code}: {reason(ended.printed)}"
    wrong = "" if plan.program == "calls" else _wrong(plan, folder, ends)
    return (WRONG, wrong) if wrong else (SURVIVED, "")


def _told(fault: Fault, printed: str) -> bool:
    words = KINDS[fault.kind].words
    short = fault.kind == "stop" and fault.delay < TOLD_SECONDS
    return not words or short or re.search(words.format(rank=fault.rank), printed) is not None


def _nobody_could(plan: Plan, happened: Sequence[Fault]) -> str:
    """Return a regular expression for the error of a job whose failed ranks make it impossible to continue; "" if the
    others can."""
    lost = {fault.rank for fault in happened if fault.kind in LOSSES}
    if lost & set(plan.holders):
        return "RankLostError: (a server has|all servers have) failed"
    workers = set(range(plan.ranks - plan.servers))
    servers = set(range(plan.ranks)) - workers
    if any(fault.point == "mirror" for fault in happened):
        return "RankLostError"  # while the trainer was made
    left_alone = "RankLostError: all (workers|servers) have failed"
    if not plan.servers or not (workers <= lost or servers <= lost):
        left_alone = ""
    if plan.copies > 1 and len(lost) > 1 and not plan.checkpoint:  # one may have kept the other's slice
        return "RankLostError: a rank that failed in .* had the only copy of a part" + (left_alone and f"|{left_alone}")
    if plan.waits and set(range(plan.ranks - plan.spares)) <= lost:
        return "RankLostError: (all working ranks have failed|a rank that failed in .* had the only copy of a part)"
    return left_alone


def _wrong(plan: Plan, folder: Path, ends: dict[int, dict[str, Any]]) -> str:
    """Return the defect in the results of the remaining ranks as text; "" if there is none."""
    ends = {rank: end for rank, end in ends.items() if not end.get("idle")}
    if not (folder / ALONE).exists():
        return "no rank was left that can train alone"
    right, alone = np.load(folder / ALONE / "parameters.0.npy"), notes.read(folder / ALONE, 0)[-1]
    found = {rank: np.load(folder / f"parameters.{rank}.npy") for rank in ends}
    first = next(iter(ends))
    for rank, end in ends.items():
        if not np.array_equal(found[rank], found[first]) or len(set(end.get("hashes", [""]))) > 1:
            return f"the parameters of rank {rank} and of rank {first} differ"
        if end.get("lost") != ends[first].get("lost"):
            return f"rank {rank} knows of the failures {end['lost']}, and rank {first} of {ends[first]['lost']}"
        if not set(ends) <= set(end["ranks"]):  # one that has died behind its last step may be there still
            return f"rank {rank} has ended among ranks {end['ranks']}, of {sorted(ends)}"
        if [epoch["epoch"] for epoch in end.get("history", ALL)] != [*range(1, EPOCHS + 1)]:
            return f"the history of rank {rank} has other epochs: {end['history']}"
        if wrong := _accuracy(plan, end, alone["accuracy"]) or _updates(plan, end):
            return wrong
        if plan.exact and (wrong := _measured(end, alone)):
            return f"rank {rank}: {wrong}"
    if not plan.exact:
        return "" if np.isfinite(found[first]).all() else "parameters are no numbers"
    apart = float(np.abs(found[first] - right).max())
    return "" if apart < TOLERANCE else f"parameters are up to {apart:.2g} from those of a training without faults"


def _measured(end: dict[str, Any], alone: dict[str, Any]) -> str:
    """Compare the epochs and the outputs of a rank with those of one rank alone."""
    for one, other in zip(end.get("history", ()), alone.get("history", ()), strict=False):  # a loop has none
        if not np.allclose([*one.values()], [*other.values()], rtol=1e-4):
            return f"epoch {one}, and without faults {other}"
    same = np.allclose(end.get("outputs", 0), alone.get("outputs", 0), rtol=1e-3, atol=1e-6)
    return "" if same else f"outputs {end['outputs']}, and without faults {alone['outputs']}"


def _accuracy(plan: Plan, end: dict[str, Any], right: float) -> str:
    found = end["accuracy"], end["predicted"]
    worst = max(abs(each - right) for each in found) - ACCURACY if plan.exact else right - min(found) - WORSE
    return "" if worst <= 0 else f"accuracy {found[0]:.3f}, predicted {found[1]:.3f}, without faults {right:.3f}"


def _updates(plan: Plan, end: dict[str, Any]) -> str:
    """Check that every part of every batch has updated the model once."""
    if not plan.program.startswith("asynchronous") or plan.rows == "divided":  # then those of a lost rank are missing
        return ""
    wanted = ROWS // BATCH * end["parts"]
    return "" if set(end["updates"]) == {wanted} else f"epochs of {end['updates']} updates, and not of {wanted}"


def _redone(mine: Notes) -> int:
    steps = [note["step"] for note in mine if note["what"] == "step"]
    return sum(max(0, before - after + 1) for before, after in pairwise(steps))


def _faults(plan: Plan, when: dict[int, float], survivors: list[Notes], outcome: str) -> list[Injected]:
    """Return every fault that happened, in order. A fault after which the other ranks continued was survived."""
    found = []
    for place, (number, time) in enumerate(sorted(when.items(), key=lambda item: item[1])):
        fault = plan.faults[number]
        seconds = _seconds(fault, survivors, time)
        kept = outcome if place == len(when) - 1 or seconds is None else SURVIVED
        found.append(Injected(fault.name, kept, seconds))
    return found


def _seconds(fault: Fault, survivors: list[Notes], time: float) -> float | None:
    """Return the seconds until all remaining ranks had finished a step without the failed rank."""
    busy = [mine for mine in survivors if not any(note.get("idle") for note in mine)]
    firsts = [next((note["time"] for note in mine if _is_behind(note, fault, time)), None) for mine in busy]
    known = [first for first in firsts if first is not None]
    return max(known) - time if known and len(known) == len(firsts) else None


def _is_behind(note: dict[str, Any], fault: Fault, time: float) -> bool:
    return fault.kind in LOSSES and note["time"] >= time and fault.rank not in note.get("ranks", [fault.rank])


NAMED = re.compile(r"\b(\w+(?:Error|Exception|Interrupt)): (.{0,100})")


def reason(printed: str) -> str:
    """Return the last named error, or how the processes ended."""
    named = NAMED.findall(printed)
    if named:
        return ": ".join(named[-1])
    signals = re.findall(r"Signal: (.*)|exited on (signal .*)", printed)
    return next((word for pair in signals for word in pair if word), "without a word")
