"""Which backend wins in which range of sizes, and by how much: from results to plain words. No MPI here.

`auto` chooses among the others and the peer `mpi4py` is the bare call that `native` makes, so neither
competes when others do; both are judged on their own.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import geometric_mean, median
from typing import NamedTuple

from benchmarks.measuring.sizes import show
from benchmarks.showing.results import MEMORIES, TITLES, Run

TIE = 1.03  # whoever leads keeps the lead while the fastest is not faster than this
SMALL_BYTES = 64 * 1024
BASELINE, CHOOSER, BARE = "native", "auto", "mpi4py"

Times = Mapping[int, Mapping[str, float]]  # size in bytes -> backend -> time


class Range(NamedTuple):
    """Neighbouring sizes at which one backend is the fastest."""

    first: int
    last: int
    backend: str


class Crossover(NamedTuple):
    """Where one backend overtakes another."""

    nbytes: float
    before: str
    after: str


def times_of(run: Run, memory: str) -> dict[int, dict[str, float]]:
    """Median microseconds by size and backend, without backends that were wrong: they win nothing."""
    times: dict[int, dict[str, float]] = {}
    wrong = wrong_backends(run)
    for result in run.of(memory):
        if result.backend not in wrong:
            times.setdefault(result.size, {})[result.backend] = result.time_us
    return times


def competing(times: Times) -> dict[int, dict[str, float]]:
    """The times without those that stand for others, of the sizes at which some are left."""
    names = {name for found in times.values() for name in found}
    others = names - {CHOOSER, BARE}
    kept = others if len(others) > 1 else names
    rivals = {size: {name: found[name] for name in found if name in kept} for size, found in sorted(times.items())}
    return {size: found for size, found in rivals.items() if found}


def ranges(times: Times, tie: float = TIE) -> list[Range]:
    """The fastest backend of each size, neighbours with the same one taken together."""
    found: list[Range] = []
    for size in sorted(times):
        here = times[size]
        fastest = min(here, key=lambda name: here[name])
        leader = found[-1].backend if found else fastest
        if here.get(leader, math.inf) > tie * here[fastest]:
            leader = fastest
        if found and found[-1].backend == leader:
            found[-1] = found[-1]._replace(last=size)
        else:
            found.append(Range(size, size, leader))
    return found


def crossovers(times: Times, tie: float = TIE) -> list[Crossover]:
    """Where the curves of neighbouring winners meet, by straight lines between sizes in log-log scale."""
    found = ranges(times, tie)
    return [Crossover(_meeting(times, left, right), left.backend, right.backend) for left, right in pairwise(found)]


def _meeting(times: Times, left: Range, right: Range) -> float:
    first, second = left.last, right.first
    gaps = []
    for size in (first, second):
        before, after = times[size].get(left.backend), times[size].get(right.backend)
        if before is None or after is None:
            return math.sqrt(first * second)
        gaps.append(math.log(before / after))
    rise = gaps[1] - gaps[0]
    share = min(max(-gaps[0] / rise, 0.0), 1.0) if rise > 0 else 0.5
    return first * (second / first) ** share


def speedup(times: Times, span: Range, other: str) -> float | None:
    """How many times as fast as `other` the winner of a range is, as a geometric mean over its sizes."""
    ratios = [
        found[other] / found[span.backend]
        for size, found in times.items()
        if span.first <= size <= span.last and other in found and span.backend in found
    ]
    return geometric_mean(ratios) if ratios else None


def runner_up(times: Times, span: Range) -> str | None:
    """The next best in a range, by the same mean."""
    others = {name for found in times.values() for name in found} - {span.backend}
    rated = {name: ratio for name in others if (ratio := speedup(times, span, name)) is not None}
    return min(rated, key=lambda name: rated[name]) if rated else None


def verdict(run: Run) -> list[str]:
    """Sentences for people."""
    said = wrong_results(run)
    if said:
        said.append(f"left out of what follows: {', '.join(wrong_backends(run))}")
    if run.ranks == 1:
        return [
            *said,
            "One rank only: there is nothing to reduce; the times are the cost of a call, algbw means nothing",
        ]
    for memory in MEMORIES:
        times = times_of(run, memory)
        if times:
            said += [f"{TITLES[memory]}: {sentence}" for sentence in _contest(competing(times))]
            said += [f"{TITLES[memory]}: {sentence}" for sentence in _auto(times)]
    return [text[0].upper() + text[1:] for text in said + _overhead(run)]


def _contest(times: Times) -> list[str]:
    names = {name for found in times.values() for name in found}
    if len(names) == 1:
        return [f"only {names.pop()} was measured, so there is nothing to compare"]
    return [_outcome(times, span) for span in ranges(times)]


def _outcome(times: Times, span: Range) -> str:
    """Who wins a range, or that its first two are level there, which the lead within TIE allows."""
    second = runner_up(times, span)
    lead = speedup(times, span, second) if second else None
    baseline = speedup(times, span, BASELINE) if BASELINE not in (span.backend, second) else None
    gains = [f"{baseline:.2f}x as fast as {BASELINE}"] if baseline else []
    if lead and lead < TIE:
        text = f"{span.backend} and {second} are level {_span(times, span)} (within {TIE - 1:.0%})"
    else:
        text = f"{span.backend} wins {_span(times, span)}"
        gains += [f"{lead:.2f}x as fast as the runner-up {second}"] if lead else []
    return text + (f", {' and '.join(gains)}" if gains else "")


def _span(times: Times, span: Range) -> str:
    if span.first == span.last:
        return f"at {show(span.first)}"
    everywhere = span.first == min(times) and span.last == max(times)
    return f"{'at all sizes ' * everywhere}from {show(span.first)} to {show(span.last)}"


def _auto(times: Times) -> list[str]:
    """How close auto comes to the best of the others, and what it gains over native."""
    rivals = competing(times)
    best = {size: min(found.values()) for size, found in rivals.items() if found}
    if all(CHOOSER not in found for found in times.values()) or any(CHOOSER in found for found in rivals.values()):
        return []
    sizes = [size for size in times if CHOOSER in times[size] and size in best]
    text = f"auto reaches {_worst({size: best[size] / times[size][CHOOSER] for size in sizes})} of the best one's speed"
    against = {size: times[size][BASELINE] / times[size][CHOOSER] for size in sizes if BASELINE in times[size]}
    return [text + (f" and {_worst(against)} of native's" if against else "")]


def _worst(ratios: Mapping[int, float]) -> str:
    low = min(ratios, key=lambda size: ratios[size])
    return f"{geometric_mean(ratios.values()):.2f} on average (at worst {ratios[low]:.2f}, at {show(low)})"


def _overhead(run: Run) -> list[str]:
    """What a small call costs over the bare one."""
    times = {size: found for size, found in times_of(run, "foreign").items() if size < SMALL_BYTES}
    extra = []
    for name in (BASELINE, CHOOSER):
        gaps = [found[name] - found[BARE] for found in times.values() if name in found and BARE in found]
        if gaps:
            extra.append(f"{name} {median(gaps):+.2f} us")
    return [f"below 64 KiB a call against mpi4py's bare Allreduce: {', '.join(extra)} (median)"] if extra else []


def wrong_results(run: Run) -> list[str]:
    """A sentence for each result that was wrong."""
    return [
        f"WRONG RESULTS: {each.backend}, {TITLES[each.memory]}, {show(each.size)}: {each.wrong} elements"
        for each in run.results
        if each.wrong
    ]


def wrong_backends(run: Run) -> list[str]:
    return list(dict.fromkeys(result.backend for result in run.results if result.wrong))
