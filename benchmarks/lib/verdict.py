"""From results to sentences: which backend wins in which range of sizes (`verdict`), which to use (`advice`). No MPI.

`auto` chooses among the others and the peer `mpi4py` is the bare call that `native` makes, so neither
competes when others do; both are judged on their own.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import geometric_mean, median
from typing import NamedTuple

from benchmarks.lib.results import MEMORIES, TITLES, Result, Run
from benchmarks.lib.sizes import show

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


WORTH = 1.15  # times as fast as auto, in its median and its minimum, is worth a choice by hand
LEAST_GAIN_US = 5.0  # and so much a call: below it a training sees no difference
NOISY = 10.0  # times the median: where p99 is more in a quarter of the results, medians are luck
MOST_CHOICES = 2  # by hand; with more of them auto needs a table of this machine


class Choice(NamedTuple):
    """A backend that is faster than auto for neighbouring sizes in one kind of memory."""

    memory: str
    first: int
    last: int
    backend: str
    gain: float  # times as fast as auto, the geometric mean over the sizes

    def __str__(self) -> str:
        sizes = show(self.first) if self.first == self.last else f"{show(self.first)} to {show(self.last)}"
        return f'"{self.backend}" for {TITLES[self.memory]} of {sizes}, where it is {self.gain:.2f} times as fast'


def advice(run: Run) -> str:
    """One sentence."""
    if wrong := wrong_backends(run):
        names = ", ".join(f'"{name}"' for name in wrong)
        return f"Do not use {names} here: there are wrong results, so times were not compared."
    if run.ranks == 1:
        return "Start at least 2 ranks (mpirun -n 2): one rank has nothing to reduce."
    if (times := spread(run)) > NOISY:
        cores, node = run.machine.get("cores", run.ranks), run.ranks if run.simulated else max(run.node_sizes)
        fewer = f", with at most {cores} rank{'s' * (cores != 1)} on a node, one for each core" if node > cores else ""
        noise = f"in a quarter of the results p99 is at least {times:.0f} times the median"
        return f"Too noisy: {noise}; run again when the machine is quiet{fewer}."
    own = {each.backend for each in run.of("allocated")}  # other software has no allocate()
    if len(own) < 2:
        return f"Only {', '.join(run.backends())} took part: leave out --backends to compare all."
    return _beside_auto(run, own - {CHOOSER}) if CHOOSER in own else _without_auto(run, own)


def spread(run: Run) -> float:
    """p99 over the median: a quarter of the results have this ratio or a larger one."""
    ratios = sorted(each.p99_us / each.time_us for each in run.results)
    return ratios[len(ratios) * 3 // 4]


def _beside_auto(run: Run, others: set[str]) -> str:
    found = [choice for memory in MEMORIES for choice in choices(run, memory, others)]
    if not found:
        return f'Use "{CHOOSER}": no backend is more than {WORTH - 1:.0%} and {LEAST_GAIN_US:g} us faster at any size.'
    found.sort(key=lambda choice: choice.gain, reverse=True)
    if len(found) <= MOST_CHOICES:
        return f'Use "{CHOOSER}", but {" and ".join(map(str, found))}.'
    tune = f"mpirun -n {run.ranks} python -m benchmarks.tune"
    return f'Let "{CHOOSER}" decide by measurements of this machine ({tune}): now it misses {found[0]}.'


def choices(run: Run, memory: str, others: set[str]) -> list[Choice]:
    """Ranges of sizes, rising, at each size of which one of the other backends is worth a choice by hand."""
    by_size: dict[int, dict[str, Result]] = {}
    for each in run.of(memory):
        by_size.setdefault(each.size, {})[each.backend] = each
    found: list[Choice] = []
    span: list[dict[str, Result]] = []  # neighbouring sizes, at each of which all of `able` are worth it
    able: set[str] = set()
    for here in [*(by_size[size] for size in sorted(by_size) if CHOOSER in by_size[size]), {}]:
        worth = {name for name in others if _worth(here, name)}
        if span and not able & worth:
            found.append(_best(span, memory, able))
            span = []
        if worth:
            able = able & worth if span else worth
            span.append(here)
    return found


def _worth(here: dict[str, Result], name: str) -> bool:
    auto, other = here.get(CHOOSER), here.get(name)
    return (
        auto is not None
        and other is not None
        and min(auto.time_us / other.time_us, auto.min_us / other.min_us) > WORTH
        and auto.time_us - other.time_us > LEAST_GAIN_US
    )


def _best(span: Sequence[dict[str, Result]], memory: str, able: set[str]) -> Choice:
    """The backend of `able` that is fastest over neighbouring sizes."""
    gains = {name: geometric_mean(here[CHOOSER].time_us / here[name].time_us for here in span) for name in sorted(able)}
    best = max(gains, key=lambda name: gains[name])
    return Choice(memory, span[0][CHOOSER].size, span[-1][CHOOSER].size, best, gains[best])


def _without_auto(run: Run, own: set[str]) -> str:
    parts = {memory: found for memory in MEMORIES if (found := _winners(run, memory, own))}
    winners = {span.backend for found in parts.values() for span in found}
    if len(winners) == 1:
        return f'Use "{winners.pop()}": it is the fastest at every size, or within {WORTH - 1:.0%} of it.'
    if sum(map(len, parts.values())) > 2 * MOST_CHOICES:
        return f'Use "{CHOOSER}", which was not measured: the fastest backend changes from size to size.'
    words = {memory: _in_words(found) for memory, found in parts.items()}
    if len(set(words.values())) == 1:
        return f"Use {next(iter(words.values()))}."
    told = (f"{text} for {TITLES[memory]}" for memory, text in words.items())
    return f"Use {', and '.join(told)}."


def _winners(run: Run, memory: str, own: set[str]) -> list[Range]:
    times: dict[int, dict[str, float]] = {}
    for each in run.of(memory):
        if each.backend in own:
            times.setdefault(each.size, {})[each.backend] = each.time_us
    return ranges(times, tie=WORTH)


def _in_words(found: Sequence[Range]) -> str:
    """'"native" up to 32 KiB, "shared" from 64 KiB on'."""
    if len(found) == 1:
        return f'"{found[0].backend}"'
    first, *middle, last = found
    between = [f'"{each.backend}" from {show(each.first)} to {show(each.last)}' for each in middle]
    ends = f'"{first.backend}" up to {show(first.last)}', f'"{last.backend}" from {show(last.first)} on'
    return ", ".join([ends[0], *between, ends[1]])
