"""The one sentence that a run of the bandwidth benchmark comes to: which backend to use here. No MPI."""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

from benchmarks.measuring.sizes import show
from benchmarks.showing.results import MEMORIES, TITLES, Result, Run
from benchmarks.showing.verdict import CHOOSER, Range, ranges, wrong_backends

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
