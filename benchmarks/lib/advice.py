"""The fastest backend of each range of sizes (`ranges`), and one sentence on which to use (`advice`). No MPI.

`auto` selects one of the other backends, and the peer `mpi4py` is the bare call inside `native`. So neither is compared
with the others, if there are at least two; `auto` is, beside peers alone.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

import allreduce
from benchmarks.lib.results import MEMORIES, TITLES, Result, Run
from benchmarks.lib.sizes import show

TIE = 1.03  # a range continues with its backend while no other one is faster by more than this factor
BASELINE, CHOOSER, BARE = "native", "auto", "mpi4py"

Times = Mapping[int, Mapping[str, float]]  # size in bytes -> backend -> time


class Range(NamedTuple):
    """Neighbouring sizes at which one backend is the fastest."""

    first: int
    last: int
    backend: str


def times_of(run: Run, memory: str) -> dict[int, dict[str, float]]:
    """Return median microseconds by size and backend, without backends that had wrong results."""
    times: dict[int, dict[str, float]] = {}
    wrong = wrong_backends(run)
    for result in run.of(memory):
        if result.backend not in wrong:
            times.setdefault(result.size, {})[result.backend] = result.time_us
    return times


def competing(times: Times) -> dict[int, dict[str, float]]:
    """Return the times without `mpi4py`, and without `auto` beside two other backends. If fewer than two names would
    remain, return all times."""
    names = {name for found in times.values() for name in found}
    selected = len(names.intersection(allreduce.NAMES)) > 2
    others = names - {BARE} - ({CHOOSER} if selected else set())
    kept = others if len(others) > 1 else names
    rivals = {size: {name: found[name] for name in found if name in kept} for size, found in sorted(times.items())}
    return {size: found for size, found in rivals.items() if found}


def ranges(times: Times, tie: float = TIE) -> list[Range]:
    """Return the ranges of neighbouring sizes with the same fastest backend, in ascending order."""
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


def wrong_results(run: Run) -> list[str]:
    """Return a sentence for each wrong result."""
    return [
        f"WRONG RESULTS: {each.backend}, {TITLES[each.memory]}, {show(each.size)}: {each.wrong} elements"
        for each in run.results
        if each.wrong
    ]


def wrong_backends(run: Run) -> list[str]:
    return list(dict.fromkeys(result.backend for result in run.results if result.wrong))


WORTH = 1.15  # a backend is recommended if it is this many times as fast as auto, in median and minimum,
LEAST_GAIN_US = 5.0  # and if it saves at least this time a call; less makes no difference to training
NOISY = 10.0  # p99 / median; if a quarter of the results exceed it, medians are not reliable
MOST_CHOICES = 2  # recommended backends; if there are more, auto needs a table for this machine


class Choice(NamedTuple):
    """A backend that is faster than auto for neighbouring sizes in one kind of memory."""

    memory: str
    first: int
    last: int
    backend: str
    gain: float  # times as fast as auto, the geometric mean over the sizes

    def __str__(self) -> str:
        sizes = _sizes(self.first, self.last)
        return f'"{self.backend}" for {TITLES[self.memory]} of {sizes}, where it is {self.gain:.2f} times as fast'


def _sizes(first: int, last: int) -> str:
    return show(first) if first == last else f"{show(first)} to {show(last)}"


def advice(run: Run) -> str:
    """Return one sentence of advice: which backend to use."""
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
    own = {each.backend for each in run.of("allocated")}  # peers have no allocate()
    if len(own) < 2:
        return f"Only {', '.join(run.backends())} took part: leave out --backends to compare all."
    return _beside_auto(run, own - {CHOOSER}) if CHOOSER in own else _without_auto(run, own)


def spread(run: Run) -> float:
    """Return the p99 / median that a quarter of the results reach or exceed."""
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
    """Return the ranges of sizes, in ascending order, in which another backend is clearly faster than auto."""
    by_size: dict[int, dict[str, Result]] = {}
    for each in run.of(memory):
        by_size.setdefault(each.size, {})[each.backend] = each
    found: list[Choice] = []
    span: list[dict[str, Result]] = []  # neighbouring sizes, at all of which each of `able` is clearly faster
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
    """Return the backend of `able` that is the fastest over neighbouring sizes."""
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
    words = {memory: in_words(found) for memory, found in parts.items()}
    if len(set(words.values())) == 1:
        return f"Use {next(iter(words.values()))}."
    sentences = (f"{text} for {TITLES[memory]}" for memory, text in words.items())
    return f"Use {', and '.join(sentences)}."


def _winners(run: Run, memory: str, own: set[str]) -> list[Range]:
    times = {size: {name: here[name] for name in here if name in own} for size, here in times_of(run, memory).items()}
    return ranges({size: here for size, here in times.items() if here}, tie=WORTH)


def in_words(found: Sequence[Range]) -> str:
    """'"native" up to 32 KiB, "shared" from 64 KiB on'."""
    if len(found) == 1:
        return f'"{found[0].backend}"'
    first, *middle, last = found
    between = [f'"{each.backend}" for {_sizes(each.first, each.last)}' for each in middle]
    ends = f'"{first.backend}" up to {show(first.last)}', f'"{last.backend}" from {show(last.first)} on'
    return ", ".join([ends[0], *between, ends[1]])
