"""Whole tensors dealt to ranks: every tensor has one owner, and the shares are alike."""

import random
from itertools import accumulate, pairwise

from trainers.state.dealing import deal


def drawn(seed: int) -> tuple[list[int], int]:
    """Return the sizes of some tensors, of a few magnitudes, and a number of ranks."""
    chance = random.Random(seed)
    ranks = chance.choice([1, 2, 3, 5, 8, 16])
    count = chance.randint(4 * ranks, 200)
    return [int(10 ** chance.uniform(0, 4)) if seed % 2 else chance.randint(1, 1000) for _ in range(count)], ranks


NEAR = [7, 10, 5, 10, 7, 7, 5, 8, 5, 5, 10, 5, 7], 5  # the largest share is 22 if tensors stay near their chunks


def homes_of(sizes: list[int], ranks: int) -> list[list[int]]:
    """Return how much of each tensor is in each rank's chunk of a buffer that has them one after the other."""
    whole, ends = sum(sizes), [0, *accumulate(sizes)]
    return [
        [max(0, min(end, whole * (rank + 1) // ranks) - max(start, whole * rank // ranks)) for rank in range(ranks)]
        for start, end in pairwise(ends)
    ]


def largest_share(sizes: list[int], owners: list[int], ranks: int) -> int:
    shares = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        shares[owner] += size
    return max(shares)


def good(sizes: list[int], ranks: int) -> float:
    return max(1.2 * sum(sizes) / ranks, *sizes, 0)


def smallest(sizes: list[int], ranks: int) -> int:
    """Return the smallest possible largest share, by trying all."""
    shares, best = [0] * ranks, sum(sizes)

    def place(number: int) -> None:
        nonlocal best
        if max(shares) < best and number == len(sizes):
            best = max(shares)
        for share in {} if max(shares) >= best else set(shares):
            at = shares.index(share)
            shares[at] += sizes[number]
            place(number + 1)
            shares[at] -= sizes[number]

    place(0)
    return best


def test_a_deal_of_few_tensors_is_the_best_one() -> None:
    """The largest share is within the bound wherever any deal is, and otherwise as small as possible."""
    impossible = 0
    for seed in range(400):
        chance = random.Random(seed)
        ranks, count = chance.choice([1, 2, 3, 4, 5]), chance.randint(0, 9)
        sizes = [chance.choice([0, 5, 7, chance.randint(1, 10), chance.randint(1, 1000)]) for _ in range(count)]
        most = max(smallest(sizes, ranks), good(sizes, ranks))
        assert largest_share(sizes, deal(sizes, [[0] * ranks for _ in sizes], ranks), ranks) <= most, (sizes, ranks)
        impossible += most > good(sizes, ranks)
    assert impossible > 3, "some of them have no deal within the bound"


def test_no_share_is_much_larger_than_the_mean() -> None:
    moved = total = 0
    for sizes, ranks in (*map(drawn, range(400)), NEAR):
        homes = homes_of(sizes, ranks)
        owners = deal(sizes, homes, ranks)
        assert largest_share(sizes, owners, ranks) <= good(sizes, ranks)
        moved += sum(size - home[owner] for size, home, owner in zip(sizes, homes, owners, strict=True))
        total += sum(sizes)
    assert moved < 0.2 * total, "most elements stay where they are reduced"
