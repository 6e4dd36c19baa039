"""What is said of the strategies, and whether the numbers of a run show or refute it."""

from collections.abc import Sequence

from benchmarks.comparing.runs import Outcome

KEEPS_SPEED = 1.25  # times the time with equal ranks
SAME_ACCURACY = 0.02
HALF = 0.6
LEVEL = 1.05  # times the fastest one's time: as fast as that


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each run; the runs with a slow rank follow the others."""
    head = f"{'':<25}{'s/epoch':>8}{'updates/s':>11}{'samples/s':>11}{'accuracy':>10}{'behind':>8}{'dropped':>9}"
    lines = [f"# {head}{'MB/epoch':>10}{'MB/s':>8}  busiest"]
    for slow in (False, True):
        some = [each for each in outcomes if each.slow == slow]
        if some:
            lines.append(f"# {'one slow rank' if slow else 'equal ranks'}")
        lines += [row(each) for each in some]
    return lines


def row(outcome: Outcome) -> str:
    behind = f"{outcome.mean_staleness:.1f}" if outcome.staleness else "-"
    return (
        f"  {outcome.variant:<25}{outcome.seconds:>8.3f}{outcome.updates_per_second:>11.0f}"
        f"{outcome.samples_per_second:>11.0f}{outcome.accuracy:>10.4f}{behind:>8}{outcome.dropped:>9}"
        f"{outcome.megabytes:>10.1f}{outcome.megabytes / outcome.seconds:>8.1f}  rank {outcome.busiest}"
    )


def findings(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each claim of which the runs are there."""
    by_name = {(each.variant, each.slow): each for each in outcomes}
    lines = []
    for claim in (_fastest, _spare, _steps, _accuracy, _bytes):
        lines += claim(by_name)
    return lines


Runs = dict[tuple[str, bool], Outcome]


def _verdict(shown: bool, claim: str, figures: str) -> str:
    return f"{'Shown' if shown else 'Refuted'}: {claim} ({figures})"


def _fastest(runs: Runs) -> list[str]:
    equal = sorted((each for each in runs.values() if not each.slow), key=lambda each: -each.samples_per_second)
    mirrored = runs.get(("mirrored", False))
    if len(equal) < 2 or mirrored is None:
        return []
    figures = ", ".join(f"{each.variant} {each.samples_per_second:.0f}" for each in equal[:3])
    shown = mirrored.samples_per_second * LEVEL >= equal[0].samples_per_second
    claim = "with equal ranks nothing is faster than mirrored, by more than 5 %"
    return [_verdict(shown, claim, f"samples/s: {figures}")]


def _spare(runs: Runs) -> list[str]:
    ratios = _ratios(runs)
    if not {"mirrored", "1 spare replica"} <= ratios.keys():
        return []
    spare, mirrored = ratios["1 spare replica"], ratios["mirrored"]
    figures = f"an epoch takes {spare:.2f} times as long with a slow rank; mirrored {mirrored:.2f} times"
    shown = spare <= KEEPS_SPEED and spare < mirrored
    return [_verdict(shown, "spare replicas keep their speed with a slow rank", figures)]


def _steps(runs: Runs) -> list[str]:
    slow = sorted((each for each in runs.values() if each.slow), key=lambda each: -each.updates_per_second)
    if not any("async" in each.variant for each in slow) or len(slow) < 2:
        return []
    figures = ", ".join(f"{each.variant} {each.updates_per_second:.0f}" for each in slow[:4])
    return [_verdict("async" in slow[0].variant, "with a slow rank async does most steps", f"updates/s: {figures}")]


def _accuracy(runs: Runs) -> list[str]:
    lines = []
    for slow in (False, True):
        mirrored, scaled = runs.get(("mirrored", slow)), runs.get(("1 server, async, scale", slow))
        if mirrored and scaled:
            figures = f"{scaled.accuracy:.4f}, mirrored {mirrored.accuracy:.4f}"
            kept = runs.get(("1 server, async", slow))
            figures += f'; stale="keep" {kept.accuracy:.4f}' if kept else ""
            where = "with a slow rank" if slow else "with equal ranks"
            shown = scaled.accuracy >= mirrored.accuracy - SAME_ACCURACY
            lines.append(_verdict(shown, f'{where} async reaches the accuracy with stale="scale"', figures))
    return lines


def _bytes(runs: Runs) -> list[str]:
    lines = []
    for kind in ("sync", "async"):
        one, two = runs.get((f"1 server, {kind}", False)), runs.get((f"2 servers, {kind}", False))
        if one and two:
            shares = one.megabytes / one.workers, two.megabytes / two.workers
            figures = (
                f"{kind}: {shares[0]:.1f} and {shares[1]:.1f} MB an epoch and worker; an epoch takes "
                f"{one.seconds:.3f} s with {one.workers} workers and {two.seconds:.3f} s with {two.workers}"
            )
            claim = "two servers halve the bytes through the busiest rank"
            lines.append(_verdict(shares[1] <= HALF * shares[0], claim, figures))
    return lines


def _ratios(runs: Runs) -> dict[str, float]:
    """By variant, how much longer an epoch takes with a slow rank."""
    return {
        name: each.seconds / runs[name, False].seconds
        for (name, slow), each in runs.items()
        if slow and (name, False) in runs
    }
