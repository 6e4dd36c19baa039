"""Halving: budgets, survivors, and how a rung's trials are divided over the ranks."""

import pytest

from trainers.errors import ArgumentError
from trainers.many.halving import Division, Halving, divide


def test_budgets_and_survivors() -> None:
    assert Halving(1, 3, 27).budgets == [1, 3, 9, 27]
    assert Halving(1, 3, 20).budgets == [1, 3, 9, 20]
    assert Halving(2, 2, 3).budgets == [2, 3]
    assert [Halving(1, 3, 27).survivors(20, rung) for rung in range(4)] == [20, 6, 2, 1]
    assert [Halving(1, 3, 27).survivors(2, rung) for rung in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "given", [(0, 3, 9), (1, 1, 9), (1.5, 3, 9), (1, 2.5, 9), (1, 3, 9.5), (True, 3, 9), (9, 3, 9)]
)
def test_bad_budgets(given: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"Halving\(first="):
        Halving(*given)


@pytest.mark.parametrize(
    ("costs", "ranks", "options", "expected"),
    [
        ([1] * 8, 4, {}, Division((1, 1, 1, 1), 8)),
        ([1] * 9, 4, {}, Division((1, 1, 1, 1), 8)),  # the ninth follows, on all ranks
        ([1] * 3, 4, {}, Division((2, 2), 2)),  # the third follows, on all ranks
        ([1] * 2, 4, {}, Division((2, 2), 2)),
        ([3, 1], 4, {}, Division((3, 1), 2)),
        ([2, 1, 1], 4, {}, Division((2, 1, 1), 3)),
        ([5, 4, 3, 2, 2, 1, 1, 1, 1], 4, {}, Division((1, 1, 1, 1), 9)),
        ([1] * 4, 4, {"least": 2}, Division((2, 2), 4)),
        ([1] * 4, 5, {"least": 2}, Division((5,), 4)),
        ([1] * 4, 4, {"most": 1}, Division((4,), 4)),
        ([1] * 100, 6, {}, Division((1,) * 6, 100)),
        ([0.0] * 3, 2, {}, Division((1, 1), 3)),
        ([1], 1, {}, Division((1,), 1)),
    ],
)
def test_divisions(costs: list[float], ranks: int, options: dict[str, int], expected: Division) -> None:
    assert divide(costs, ranks, **options) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 27])
def test_every_trial_runs_and_no_rank_is_expected_to_be_idle(ranks: int, count: int) -> None:
    """A division for all trials of a rung, and one for those that it leaves out, and so on."""
    costs = sorted((1 + 2 * ((7 * number) % count) / count for number in range(count)), reverse=True)
    while costs:
        division = divide(costs, ranks)
        assert sum(division.sizes) == ranks
        assert len(division.sizes) <= division.trials <= len(costs)
        ends = [0.0] * len(division.sizes)
        for cost in costs[: division.trials]:
            part = ends.index(min(ends))
            ends[part] += cost / division.sizes[part]
        assert sum(costs[: division.trials]) >= 0.95 * ranks * max(ends) - 1e-9
        costs = costs[division.trials :]
