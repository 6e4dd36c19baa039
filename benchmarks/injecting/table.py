"""The table of a long run, and its JSON."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.injecting.judging import OUTCOMES, Injected, Judged

HEAD = f"{'injected':32}{'times':>6}" + "".join(f"{name:>10}" for name in OUTCOMES) + f"{'median s':>10}{'max s':>10}"


def table(runs: Sequence[Judged]) -> str:
    """A line for every kind of fault, and one for all."""
    faults = [fault for run in runs for fault in run.faults]
    lines = [HEAD]
    for name in sorted({fault.name for fault in faults}):
        lines.append(_line(name, [fault for fault in faults if fault.name == name]))
    lines.append(_line("all", faults))
    redone = [run.redone for run in runs if run.faults]
    if redone:
        lines.append(
            f"steps done again, a run: median {statistics.median(redone):g}, most {max(redone)} (besides the one that "
            "a loss has broken off)"
        )
    return "\n".join(lines)


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


def _line(name: str, faults: Sequence[Injected]) -> str:
    counts = "".join(f"{sum(fault.outcome == outcome for fault in faults):>10}" for outcome in OUTCOMES)
    seconds = [fault.seconds for fault in faults if fault.seconds is not None]
    times = f"{statistics.median(seconds):>10.3f}{max(seconds):>10.3f}" if seconds else f"{'':>20}"
    return f"{name:32}{len(faults):>6}{counts}{times}".rstrip()
