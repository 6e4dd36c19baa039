"""What the doctor has found: the facts that ranks gather, the findings made of them, and how a report shows these."""

import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

OK, WARNING, PROBLEM = LEVELS = ("ok", "warning", "problem")
EXTRA = 'pip install ".[doctor]" in the checkout'  # libraries by which the doctor sees more
MOST_NAMED = 5  # of things that are alike; the rest are counted
WIDTH, NARROWEST = 110, 40
COLOURS = {OK: "\033[32m", WARNING: "\033[33m", PROBLEM: "\033[31m"}
PLAIN = "\033[0m"

KeyT = TypeVar("KeyT", bound=Hashable)


class Rank(NamedTuple):
    """The facts that one rank has gathered, by the keys of command.LOOKS."""

    rank: int
    node: int
    host: str  # a name for the node
    facts: dict[str, Any]


class Needs(NamedTuple):
    """What the training will want."""

    parameters: int
    asked: bool = False  # by the user: too little for that is a problem, and not only a warning


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    level: str
    text: str
    advice: str = ""  # what to do; empty when all is well
    area: str = ""  # the heading over it; the caller of a `judge` sets it


def ok(name: str, text: str) -> Finding:
    return Finding(name, OK, text)


def warning(name: str, text: str, advice: str) -> Finding:
    return Finding(name, WARNING, text, advice)


def problem(name: str, text: str, advice: str) -> Finding:
    return Finding(name, PROBLEM, text, advice)


def alike(name: str, kinds: dict[str, list[Rank]], advice: str, level: str = WARNING) -> Finding:
    """ok where all ranks have the same, else a finding of `level` that says which ranks have what."""
    if len(kinds) == 1:
        return ok(name, next(iter(kinds)))
    text = "; ".join(f"{kind} on {named(ranks)}" for kind, ranks in kinds.items())
    return Finding(name, level, text, advice)


def exit_code(findings: Iterable[Finding]) -> int:
    """0, 1 or 2: by the worst of them."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


# The report


def report(title: str, findings: Sequence[Finding], coloured: bool = False) -> str:
    """The findings in lines: a heading for each area, then level, name and text; what to do below it."""
    levels, names = max(map(len, LEVELS)), max(len(finding.name) for finding in findings)
    indent = " " * (2 + levels + 2 + names + 2)
    lines = [title]
    for area, group in groupby(findings, lambda finding: finding.area):
        lines += ["", area]
        for finding in group:
            level = finding.level.ljust(levels)
            shown = f"{COLOURS[finding.level]}{level}{PLAIN}" if coloured else level
            first, *rest = _wrapped(finding.text, indent)
            lines += [f"  {shown}  {finding.name.ljust(names)}  {first}", *(indent + line for line in rest)]
            if finding.advice:
                first, *rest = _wrapped(finding.advice, f"{indent}-> ")
                lines += [f"{indent}-> {first}", *(f"{indent}   {line}" for line in rest)]
    return "\n".join([*lines, "", summary(findings)]) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    width = max(NARROWEST, WIDTH - len(indent))
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each level, and the exit code."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    code = exit_code(findings)
    if not code:
        return f"{plural(counts[OK], 'finding')}, all ok"
    worse = [plural(counts[level], level) for level in (PROBLEM, WARNING) if counts[level]]
    return f"{', '.join(worse)}, {counts[OK]} ok; exit code {code}"


# Ranks and numbers in words


def by_node(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """The ranks of each node."""
    return list(grouped(ranks, lambda rank: rank.node).values())


def grouped(ranks: Iterable[Rank], key: Callable[[Rank], KeyT]) -> dict[KeyT, list[Rank]]:
    """The ranks with each value of `key`, in the order in which the values are met."""
    found: dict[KeyT, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def named(ranks: Iterable[Rank]) -> str:
    """ "rank 3", "ranks 0-3, 7" """
    numbers = sorted(rank.rank for rank in ranks)
    return f"rank{'s' * (len(numbers) != 1)} {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """ "0-3, 7" of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def some(texts: Sequence[str], separator: str = "; ") -> str:
    """The first few of them, and how many more there are."""
    more = len(texts) - MOST_NAMED
    return separator.join(texts[:MOST_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def nbytes(number: float) -> str:
    """ "1.5 GiB" """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while number >= 1024 and power < len(units) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.0f} {units[power]}" if number >= 100 else f"{number:.3g} {units[power]}"


def count(parameters: int) -> str:
    """ "25M", "1.5B" """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.4g}{unit}"
    return str(parameters)


def plural(number: float, word: str) -> str:
    """ "1 rank", "2 ranks", "1.5 cores" """
    return f"{number:g} {word}{'s' * (number != 1)}"
