"""Whole tensors dealt to ranks: every tensor has one owner, and the shares are alike."""

import random
from itertools import accumulate, pairwise

import pytest

from trainers.state.dealing import deal, deal_in_order


def drawn(seed: int) -> tuple[list[int], int]:
    """Return the sizes of some tensors, of a few magnitudes, and a number of ranks."""
    chance = random.Random(seed)
    ranks = chance.choice([1, 2, 3, 5, 8, 16])
    count = chance.randint(4 * ranks, 200)
    return [int(10 ** chance.uniform(0, 4)) if seed % 2 else chance.randint(1, 1000) for _ in range(count)], ranks


def largest_share(sizes: list[int], owners: list[int], ranks: int) -> int:
    shares = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        shares[owner] += size
    return max(shares)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_share_is_much_larger_than_the_mean(first: int) -> None:
    moved = total = 0
    for seed in range(first, first + 100):
        sizes, ranks = drawn(seed)
        whole, ends = sum(sizes), [0, *accumulate(sizes)]
        homes = [
            [max(0, min(end, whole * (rank + 1) // ranks) - max(start, whole * rank // ranks)) for rank in range(ranks)]
            for start, end in pairwise(ends)
        ]
        owners = deal(sizes, homes, ranks)
        assert largest_share(sizes, owners, ranks) <= max(1.2 * whole / ranks, *sizes)
        moved += sum(size - home[owner] for size, home, owner in zip(sizes, homes, owners, strict=True))
        total += whole
    assert moved < 0.2 * total, "most elements stay where they are reduced"


@pytest.mark.parametrize(
    ("sizes", "ranks", "most"), [([1, 1, 1], 2, 2), ([9, 5, 5, 1], 2, 10), ([7], 3, 7), ([], 2, 0), ([0, 0, 4], 2, 4)]
)
def test_few_tensors(sizes: list[int], ranks: int, most: int) -> None:
    assert largest_share(sizes, deal(sizes, [[0] * ranks for _ in sizes], ranks), ranks) == most
    assert max(part.stop - part.start for part in deal_in_order(sizes, ranks)) >= most


def test_parts_in_order_end_between_tensors() -> None:
    good = 0
    for seed in range(300):
        sizes, ranks = drawn(seed)
        ends, parts = [0, *accumulate(sizes)], deal_in_order(sizes, ranks)
        assert len(parts) == ranks
        assert (parts[0].start, parts[-1].stop) == (0, ends[-1])
        assert all(one.stop == other.start for one, other in pairwise(parts))
        assert all(part.start in ends for part in parts)
        largest = max(part.stop - part.start for part in parts)
        assert largest <= sum(sizes) / ranks + max(sizes)
        good += largest <= max(1.2 * sum(sizes) / ranks, *sizes)
    assert good > 250
