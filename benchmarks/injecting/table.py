"""The table of a long run, and its JSON."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.injecting.judging import ENDED, HUNG, OF_MPI, OUTCOMES, WRONG, Injected, Judged

HEAD = f"{'times':>6}" + "".join(f"{name:>10}" for name in OUTCOMES) + f"{'median s':>10}{'max s':>8}{'redone':>8}"


def table(runs: Sequence[Judged]) -> str:
    """A line for every kind of fault, one for every program, one for all, and why runs have ended."""
    pairs = [(run, fault) for run in runs for fault in run.faults]
    lines = _group("injected", pairs, lambda _, fault: fault.name)
    lines += ["", *_group("program", pairs, lambda run, _: run.plan.program), "", _line("all", pairs)]
    bad = Counter((run.outcome, run.why) for run in runs if run.outcome in (HUNG, WRONG, OF_MPI, ENDED))
    lines += [f"{times} x {outcome}: {why}" for (outcome, why), times in bad.most_common()]
    return "\n".join(lines)


def _group(title: str, pairs: Sequence[tuple[Judged, Injected]], key: Callable[[Judged, Injected], str]) -> list[str]:
    names = sorted({key(*pair) for pair in pairs})
    return [f"{title:32}{HEAD}", *(_line(name, [pair for pair in pairs if key(*pair) == name]) for name in names)]


def _line(name: str, pairs: Sequence[tuple[Judged, Injected]]) -> str:
    """redone: the most steps that a run has done again, besides the one that a loss has broken off."""
    counts = "".join(f"{sum(fault.outcome == outcome for _, fault in pairs):>10}" for outcome in OUTCOMES)
    seconds = [fault.seconds for _, fault in pairs if fault.seconds is not None]
    times = f"{statistics.median(seconds):>10.3f}{max(seconds):>8.3f}" if seconds else f"{'':>18}"
    redone = max((run.redone for run, _ in pairs), default=0)
    return f"{name:32}{len(pairs):>6}{counts}{times}{redone:>8}"


def record(runs: Sequence[Judged], seed: int, seconds: float) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "seed": seed,
        "seconds": seconds,
        "runs": [
            {
                "number": run.plan.number,
                "plan": str(run.plan),
                "outcome": run.outcome,
                "why": run.why,
                "seconds": run.seconds,
                "redone": run.redone,
                "faults": [vars(fault) for fault in run.faults],
            }
            for run in runs
        ],
    }
