"""A soak: one long training, of which a rank is killed now and then. Does it go on, and does anything grow?

The ranks of a job are killed at random, with --mtbf seconds between two kills on average. Standby ranks replace the
first ones; then the job continues on fewer ranks. When its last rank was killed, it is started again from its newest
checkpoint. What a loss costs is measured by the short runs: see judging.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import launch
from tests.faults import jobs, notes
from tests.faults.notes import STOP
from tests.faults.plans import Plan

SPARES = 2
LOOK_SECONDS = 0.05
GONE = "all working ranks have failed"  # of the standby ranks' error
END_SECONDS = 60.0  # for the end of a job that is told to stop


@dataclass
class Attempt:
    """One job. kills: the ranks. why: why it ended, if it should not have."""

    folder: Path
    kills: list[int] = field(default_factory=list)
    why: str = ""

    def notes(self, ranks: int) -> list[list[dict[str, Any]]]:
        """Return the positions that each rank has noted."""
        return [[note for note in notes.read(self.folder, rank) if note["what"] == "at"] for rank in range(ranks)]


def main(options: argparse.Namespace) -> int:
    """Run a soak, and print what it has found. Returns 1 if a job ended that should have gone on, or if the ranks had
    different bits at the end."""
    chance, until = random.Random(options.seed), time.monotonic() + options.hours * 3600
    attempts: list[Attempt] = []
    with tempfile.TemporaryDirectory(prefix="soak", ignore_cleanup_errors=True) as name:
        while time.monotonic() < until and not any(attempt.why for attempt in attempts):
            attempts.append(_attempt(Path(name) / str(len(attempts)), options, until, chance))
            print(f"job {len(attempts)}: {len(attempts[-1].kills)} kills {attempts[-1].why}", flush=True)
        bad = [attempt for attempt in attempts if attempt.why]
        for attempt in bad:
            print((attempt.folder / "output").read_text(errors="replace")[-3000:])
        differ = any(len(_bits(attempt, options.most_ranks)) > 1 for attempt in attempts)
        found = report(attempts, options.most_ranks)
    print("\n".join(f"{title:50}{value}" for title, value in found.items()))
    return 1 if bad or differ else 0


def _attempt(folder: Path, options: argparse.Namespace, until: float, chance: random.Random) -> Attempt:
    """Run one job until its last rank was killed, or until a time. chance: draws the kills."""
    folder.mkdir()
    attempt = Attempt(folder)
    ranks = options.most_ranks
    command = [*jobs.launcher(Plan(0, ranks)), sys.executable, "-m", "tests.faults.programs.soak", folder, SPARES]
    with (
        open(folder / "output", "wb") as output,
        launch.started([str(each) for each in command], output, subprocess.STDOUT) as job,
    ):
        attempt.why = _drive(job, attempt, options, until, chance)
    return attempt


def _drive(
    job: "subprocess.Popen[bytes]",
    attempt: Attempt,
    options: argparse.Namespace,
    until: float,
    chance: random.Random,
) -> str:
    """Kill ranks of a job; return why it has ended, if it should not have."""
    left, noted, size = set(range(options.most_ranks)), time.monotonic(), 0
    due = noted + chance.expovariate(1 / options.mtbf)
    while left:
        now = time.monotonic()
        if now > until:
            (attempt.folder / STOP).touch()
        grown = sum(path.stat().st_size for path in attempt.folder.glob("notes.*"))
        noted, size = (now, grown) if grown != size else (noted, size)
        if (code := job.poll()) is not None:
            told = (attempt.folder / STOP).exists() and code == 0
            return "" if told or _all_workers_killed(attempt, options) else f"ended with exit code {code}: see below"
        if now - noted > options.limit:
            return f"no rank has finished a step for {options.limit:.0f} s"
        if due < now < until:
            rank = chance.choice(sorted(left))
            if pids := jobs.pids(attempt.folder, rank):
                os.kill(pids[0], signal.SIGKILL)
                attempt.kills.append(rank)
                left.discard(rank)
            due = now + chance.expovariate(1 / options.mtbf)
        time.sleep(LOOK_SECONDS)
    job.wait(END_SECONDS)
    return ""


def _all_workers_killed(attempt: Attempt, options: argparse.Namespace) -> bool:
    """Return whether each working rank was killed before a standby rank had its state, and the job has said so; or
    whether a rank was killed before the first step, while the job started."""
    killed, steps = set(attempt.kills), [mine[-1] for mine in attempt.notes(options.most_ranks) if mine]
    if not steps:
        return bool(killed)
    last = max(steps, key=lambda note: float(note["time"]))
    return killed.issuperset(last["ranks"]) and GONE in (attempt.folder / "output").read_text(errors="replace")


def report(attempts: Sequence[Attempt], ranks: int) -> dict[str, str]:
    """Return the findings in words, by their titles."""
    oldest = max((mine for attempt in attempts for mine in attempt.notes(ranks) if mine), key=_age)
    bits = _bits(attempts[-1], ranks)
    return {
        "kills": f"{sum(len(attempt.kills) for attempt in attempts)} in {len(attempts)} jobs",
        "the oldest process": f"{_age(oldest):.0f} s, {len({tuple(note['ranks']) for note in oldest}) - 1} recoveries",
        "its memory, MiB": _grown(oldest, "memory"),
        "its open descriptors": _grown(oldest, "files"),
        "bits at the end": f"equal on {max(bits.values())} ranks" if len(bits) == 1 else str(dict(bits)),
        "jobs that ended by themselves": str([attempt.why for attempt in attempts if attempt.why] or "none"),
    }


def _bits(attempt: Attempt, ranks: int) -> Counter[str]:
    """Return the hashes that the ranks have noted at the end, each with the number of these ranks."""
    ends = [note for rank in range(ranks) for note in notes.read(attempt.folder, rank) if note["what"] == "end"]
    return Counter(value for note in ends for value in set(note.get("hashes", ())))


def _age(mine: Sequence[dict[str, Any]]) -> float:
    return float(mine[-1]["time"] - mine[0]["time"])


def _grown(mine: Sequence[dict[str, Any]], what: str) -> str:
    """Return the first value after a tenth of a process's life, and the last one."""
    return f"{mine[len(mine) // 10][what]:.0f}, at its end {mine[-1][what]:.0f}"
