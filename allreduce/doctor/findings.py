"""The facts of the ranks, the findings that the doctor derives from them, and the report of the findings."""

import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from allreduce.notices import scaled
from allreduce.transport.tables import spans

OK, WARNING, PROBLEM = LEVELS = ("ok", "warning", "problem")
EXTRA = 'pip install ".[doctor]" in the checkout'  # libraries that let the doctor check more
MOST_NAMED = 5  # items of a list that are named; the others are counted
WIDTH, NARROWEST = 110, 40

KeyT = TypeVar("KeyT", bound=Hashable)


class Rank(NamedTuple):
    """The facts that one rank has gathered: of all checks, by name, or of one check."""

    rank: int
    node: int
    host: str  # a name for the node
    facts: Any


class Needs(NamedTuple):
    """What the training needs."""

    parameters: int
    asked: bool = False  # whether the user gave the number: too little memory is then a problem, else a warning


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    name: str
    text: str
    advice: str = ""  # what to do; empty when the level is ok
    area: str = ""  # the heading over it


ok, warning, problem = (partial(Finding, level) for level in LEVELS)


def alike(name: str, ranks: Iterable[Rank], key: Callable[[Rank], str], advice: str, level: str = WARNING) -> Finding:
    """Return ok if all ranks have the same value of `key`, otherwise a finding of `level` with the ranks of each."""
    kinds = grouped(ranks, key)
    if len(kinds) == 1:
        return ok(name, next(iter(kinds)))
    return Finding(level, name, "; ".join(f"{kind} on {named(some)}" for kind, some in kinds.items()), advice)


# The report


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0, 1 or 2: the level of the worst finding."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def report(findings: Sequence[Finding]) -> str:
    """Format the findings: a heading for each area, then level, name and text; the advice below."""
    levels, names = max(map(len, LEVELS)), max(len(finding.name) for finding in findings)
    indent = " " * (2 + levels + 2 + names + 2)
    lines: list[str] = []

    def add(text: str, first: str, others: str) -> None:
        width = max(WIDTH, len(indent) + NARROWEST)
        wrapper = textwrap.TextWrapper(width, first, others, break_long_words=False, break_on_hyphens=False)
        lines.extend(wrapper.wrap(text))

    for area, group in groupby(findings, lambda finding: finding.area):
        lines += ["", area]
        for finding in group:
            add(finding.text, f"  {finding.level.ljust(levels)}  {finding.name.ljust(names)}  ", indent)
            add(finding.advice, f"{indent}-> ", f"{indent}   ")
    return "\n".join([*lines, "", summary(findings)]) + "\n"


def summary(findings: Sequence[Finding]) -> str:
    """Format the number of findings of each level, and the exit code."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    code = exit_code(findings)
    if not code:
        return f"{plural(counts[OK], 'finding')}, all ok"
    worse = [plural(counts[level], level) for level in (PROBLEM, WARNING) if counts[level]]
    return f"{', '.join(worse)}, {counts[OK]} ok; exit code {code}"


# Ranks and numbers in words


def by_node(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks of each node."""
    return list(grouped(ranks, lambda rank: rank.node).values())


def grouped(ranks: Iterable[Rank], key: Callable[[Rank], KeyT]) -> dict[KeyT, list[Rank]]:
    """Group the ranks by `key`, in the order in which its values first occur."""
    found: dict[KeyT, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def named(ranks: Sequence[Rank]) -> str:
    """ "rank 3", "ranks 0-3, 7" """
    return f"rank{'s' * (len(ranks) != 1)} {spans(rank.rank for rank in ranks)}"


def some(texts: Sequence[str], separator: str = "; ") -> str:
    """Join the first few texts, and say how many more there are."""
    more = len(texts) - MOST_NAMED
    return separator.join(texts[:MOST_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def count(parameters: float) -> str:
    """ "25M", "1.5B" """
    return scaled(parameters, ("", "K", "M", "B"), 1000).replace(" ", "")


def plural(number: float, word: str) -> str:
    """ "1 rank", "2 ranks", "1.5 cores" """
    return f"{number:g} {word}{'s' * (number != 1)}"
