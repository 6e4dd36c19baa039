"""Fingerprints of whole batches: float32 sums tell whether all ranks have the same, on any number of ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainers.data import SAMPLED, checksum
from trainers.strategies import alike


@pytest.mark.parametrize("ranks", [1, 2, 3, 100, 1024, 8000])
def test_sums_tell_equal_fingerprints_from_others(ranks: int) -> None:
    """In any order of the sum; ranks that read nothing are left out."""
    random, missed = np.random.default_rng(ranks), 0
    for _ in range(20):
        own = {3: (1, int(random.integers(1, 1 << 32)))}
        other = {3: (1, int(random.integers(1, 1 << 32)))}
        for different in {0, min(1, ranks - 1), ranks - 1}:
            sources: list[Any] = [SimpleNamespace(divided=False, seen=own)] * (ranks - different)
            sources += [SimpleNamespace(divided=False, seen=other)] * different
            rows = [alike.marks(each, range(3, 4), ranks) for each in random.permutation(sources)]
            rows.append(alike.marks(SimpleNamespace(divided=True), range(3, 4), ranks))  # type: ignore[arg-type]
            found = alike.differ(np.cumsum(np.array(rows, np.float32), axis=0)[-1].tolist())
            assert different or not found
            missed += bool(different) and not found
    assert missed <= 1  # with 8,000 ranks, one difference in 4,096


def test_a_checksum_shows_rows_in_another_order() -> None:
    """Also of a batch of which a sample is read."""
    for columns in (3, SAMPLED // 64):
        x = np.random.default_rng(0).normal(size=(32, columns)).astype(np.float32)
        y = np.arange(32)
        assert checksum((x, y)) == checksum((x.copy(), y))
        assert len({checksum(each) for each in ((x, y), (x[::-1], y), (x, y[::-1]), (x[:-1], y[:-1]), (y, x))}) == 5
