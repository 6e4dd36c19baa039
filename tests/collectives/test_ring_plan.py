"""The ring's plan, without MPI; the grid runs it."""

import pytest

from allreduce.algorithms import ring
from allreduce.algorithms.ring import plan
from allreduce.arrays import chunks


@pytest.mark.parametrize(("ranks", "length", "step"), [(4, 10, 2), (5, 3, 8), (1000, 100_003, 64)])
def test_the_cuts_of_a_length_are_made_once(
    ranks: int, length: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an array of the same length elsewhere: 1,000 ranks would spend 18 ms of each call on them."""
    made = []
    monkeypatch.setattr(ring, "chunk", lambda *given: made.append(given) or chunks.chunk(*given))
    ring.cut.cache_clear()
    for first, last in ((1, 2 * ranks - 1), (1, ranks), (ranks, 2 * ranks - 1)):
        made.clear()
        cuts = ring.cut(1, ranks, first, last, length, step).pieces
        assert len(made) == last - first + 1
        assert ring.cut(1, ranks, first, last, length, step).pieces is cuts
        assert len(made) == last - first + 1
        assert {index for _, piece in cuts for index in range(piece.start, piece.stop)} == set(range(length))
        assert all(piece.stop - piece.start <= step for _, piece in cuts)


def test_the_example_of_the_docstring() -> None:
    words = ("receive", "combine", "finish", "send")
    steps = [
        f"chunk {chunk}: " + ", ".join(w for w, does in zip(words, does, strict=True) if does)
        for chunk, *does in plan(0, 3, 1, 5)
    ]
    assert "; ".join(steps) in " ".join((plan.__doc__ or "").split())
