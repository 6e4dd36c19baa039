"""Findings: what was found, how bad that is, and what to do about it; and what they are made of."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from allreduce.topology import Topology

OK, WARNING, PROBLEM = LEVELS = ("ok", "warning", "problem")
MOST_NAMED = 5  # of things that are alike; the rest are counted

KeyT = TypeVar("KeyT", bound=Hashable)


class Finding(NamedTuple):
    """One line of the report."""

    area: str
    name: str
    level: str
    text: str
    advice: str = ""  # what to do; empty when all is well


class Place(NamedTuple):
    """What a look may use besides its own machine. No look communicates."""

    topology: Topology
    hosts: list[str]  # every rank's host name


class Rank(NamedTuple):
    """What one rank has found out, by the names of the modules that looked."""

    rank: int
    node: int
    host: str  # a name for the node
    facts: dict[str, Any]


class Needs(NamedTuple):
    """What the training will want."""

    parameters: int
    asked: bool = False  # by the user: what is missing for that is a problem, and not only a warning


def exit_code(findings: Iterable[Finding]) -> int:
    """0, 1 or 2: by the worst of them."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """The ranks of each node."""
    return grouped(ranks, lambda rank: rank.node)


def grouped(ranks: Iterable[Rank], key: Callable[[Rank], KeyT]) -> dict[KeyT, list[Rank]]:
    """The ranks with each value of `key`, in the order in which the values are met."""
    found: dict[KeyT, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


def of_kinds(area: str, name: str, kinds: dict[str, list[Rank]], advice: str) -> Finding:
    """That all ranks have the same, or a warning that says which have what."""
    if len(kinds) == 1:
        return Finding(area, name, OK, next(iter(kinds)))
    text = "; ".join(f"{kind} on {named(group)}" for kind, group in kinds.items())
    return Finding(area, name, WARNING, text, advice)


def named(ranks: Sequence[Rank] | Sequence[int]) -> str:
    """ "rank 3", "ranks 0-3, 7" """
    numbers = sorted(rank.rank if isinstance(rank, Rank) else rank for rank in ranks)
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


def plural(number: int, word: str) -> str:
    """ "1 rank", "2 ranks" """
    return f"{number} {word}{'s' * (number != 1)}"
