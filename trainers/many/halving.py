"""Halving: the budgets of successive halving, and the parts of ranks that run the trials of a rung. No MPI here."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from allreduce.arrays.chunks import chunk
from trainers.errors import ArgumentError

MOST_IDLE = 0.05  # the expected idle share of the ranks in a division that is used


@dataclass(frozen=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
    Optimization", AISTATS 2016): a search in rungs.

    All trials train up to the first budget. The best ones, one of `factor`, go on to a budget `factor` times as large,
    and so on up to the last budget.

    first, last: budgets, in the unit of the objective (epochs, for example): whole numbers from 1. factor: a whole
    number from 2. The last budget needs not be a power of the factor times the first: Halving(1, 3, 20) has the budgets
    1, 3, 9, 20. Raises ArgumentError.
    """

    first: int = 1
    factor: int = 3
    last: int = 27

    def __post_init__(self) -> None:
        numbers = {"first": self.first, "factor": self.factor, "last": self.last}
        for name, given in numbers.items():
            least = 2 if name == "factor" else 1
            if type(given) is not int or given < least:
                raise ArgumentError(f"{self}: {name} must be a whole number of at least {least}, got {given!r}")
        if self.last <= self.first:
            raise ArgumentError(f"{self}: last must be larger than first: one rung needs no halving")

    @property
    def budgets(self) -> list[int]:
        """The budget of each rung, ascending."""
        found = [self.first]
        while found[-1] * self.factor < self.last:
            found.append(found[-1] * self.factor)
        return [*found, self.last]

    def survivors(self, trials: int, rung: int) -> int:
        """Return how many of `trials` in the first rung begin a later one, if none fails: at least one."""
        return max(1, trials // self.factor**rung)


class Division(NamedTuple):
    """sizes: the ranks of each part, in order. trials: how many trials run on these parts, the longest ones."""

    sizes: tuple[int, ...]
    trials: int


def divide(costs: Sequence[float], ranks: int, least: int = 1, most: int | None = None) -> Division:
    """Return the division of the ranks that begins a rung; another one follows for the trials that it leaves out.

    costs: the expected cost of each trial in seconds of one rank, largest first. least: ranks of a part, at least.
    most: the largest number of parts.

    It is the division into the most parts, with the most trials, whose ranks are expected to be idle for at most
    MOST_IDLE of its time: a trial is trained by fewer ranks with less communication. As a last resort all ranks train
    one trial after the other. As many parts as trials: a part has ranks in proportion to its trial's cost. Otherwise
    the parts are of equal size, and a part that is free takes the next trial.
    """
    for count in range(min(ranks // least, most or ranks, len(costs)), 1, -1):
        equal = tuple(sorted((len(range(ranks)[chunk(ranks, count, part)]) for part in range(count)), reverse=True))
        trials = _most_trials(costs, equal)
        if trials > count:
            return Division(equal, trials)
        sizes = in_proportion(costs[:count], ranks, least)
        spent = max(cost / size for cost, size in zip(costs, sizes, strict=False))
        if _idle(sum(costs[:count]), ranks, spent) <= MOST_IDLE:
            return Division(sizes, count)
    return Division((ranks,), len(costs))


def _most_trials(costs: Sequence[float], sizes: Sequence[int]) -> int:
    """Return for how many trials, the longest ones, these parts are expected to be busy; 0 if for none."""
    free = [(0.0, part) for part in range(len(sizes))]
    total = spent = 0.0
    found = 0
    for number, cost in enumerate(costs, 1):
        begin, part = heapq.heappop(free)
        end = begin + cost / sizes[part]
        heapq.heappush(free, (end, part))
        total, spent = total + cost, max(spent, end)
        if number >= len(sizes) and _idle(total, sum(sizes), spent) <= MOST_IDLE:
            found = number
    return found


def _idle(work: float, ranks: int, seconds: float) -> float:
    return 1 - work / (ranks * seconds) if seconds > 0 else 0.0


def in_proportion(costs: Sequence[float], ranks: int, least: int) -> tuple[int, ...]:
    """Return how many ranks each trial gets: at least `least`, and every further one goes to the trial that would end
    last."""
    sizes = [least] * len(costs)
    for _ in range(ranks - sum(sizes)):
        slowest = max(range(len(costs)), key=lambda index: costs[index] / sizes[index])
        sizes[slowest] += 1
    return tuple(sizes)


def halving_error(halving: Any, directions: Sequence[str], pruner: Any) -> ArgumentError | None:
    """Return the error if a search can't halve so, or None."""
    if halving is None:
        return None
    if not isinstance(halving, Halving):
        return ArgumentError(f"halving={halving!r}: give a Halving, or None")
    if len(directions) > 1:
        return ArgumentError(
            f"halving={halving} with directions={tuple(directions)!r}: successive halving compares one value; give one "
            "direction"
        )
    if pruner is not None:
        return ArgumentError(
            f"halving={halving} with pruner={type(pruner).__name__}: successive halving ends trials itself; leave out "
            "one of the two"
        )
    return None
