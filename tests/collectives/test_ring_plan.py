"""The ring's plan, walked without MPI."""

from collections import deque

import pytest

from allreduce.algorithms import ring
from allreduce.algorithms.ring import plan, shorter
from allreduce.arrays import chunks

RANKS = range(1, 9)


class Walker:
    """A simulated rank: for each chunk the ranks whose contributions it contains; finished chunks are marked."""

    def __init__(self, rank: int, ranks: int, first: int, last: int, chunks: list[set[object]]) -> None:
        self.steps = deque(plan(rank, ranks, first, last))
        self.chunks = chunks

    def step(self, left: deque[set[object]], right: deque[set[object]]) -> bool:
        """Do the next step if its input has arrived."""
        if not self.steps or (self.steps[0].receives and not left):
            return False
        step = self.steps.popleft()
        if step.receives:
            arrived = left.popleft()
            if step.combines:
                assert not self.chunks[step.chunk] & arrived, "added twice"
                arrived = self.chunks[step.chunk] | arrived
            self.chunks[step.chunk] = arrived
        if step.finishes:
            self.chunks[step.chunk] = self.chunks[step.chunk] | {"finished"}
        if step.sends:
            right.append(self.chunks[step.chunk])
        return True


def walk(ranks: int, first: int, last: int, chunks: list[list[set[object]]]) -> list[list[set[object]]]:
    """Return the chunks of all ranks after steps `first` to `last`."""
    links: list[deque[set[object]]] = [deque() for _ in range(ranks)]  # into each rank
    walkers = [Walker(rank, ranks, first, last, held) for rank, held in enumerate(chunks)]
    while any(walker.step(links[at], links[(at + 1) % ranks]) for at, walker in enumerate(walkers)):
        pass
    assert not any(walker.steps for walker in walkers), "a rank waits for ever"
    assert not any(links), "something was sent that nobody receives"
    return [walker.chunks for walker in walkers]


def begun(ranks: int) -> list[list[set[object]]]:
    return [[{rank} for _ in range(ranks)] for rank in range(ranks)]


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


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_all_steps(ranks: int) -> None:
    whole = {*range(ranks), "finished"}
    assert walk(ranks, 1, 2 * ranks - 1, begun(ranks)) == [[whole] * ranks] * ranks


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_phases(ranks: int) -> None:
    """The reduce-scatter leaves every rank its own finished chunk, and the all-gather sends these to all ranks."""
    whole = {*range(ranks), "finished"}
    scattered = walk(ranks, 1, ranks, begun(ranks))
    assert [held[rank] for rank, held in enumerate(scattered)] == [whole] * ranks
    assert walk(ranks, ranks, 2 * ranks - 1, scattered) == [[whole] * ranks] * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_steps_and_messages_are_as_few_as_the_paper_says(ranks: int) -> None:
    for rank in range(ranks):
        steps = plan(rank, ranks, 1, 2 * ranks - 1)
        assert sum(step.sends for step in steps) == sum(step.receives for step in steps) == 2 * (ranks - 1)
        assert sum(step.combines for step in steps) == ranks - 1
        assert sum(step.finishes for step in steps) == (ranks > 1)


def test_the_example_of_the_docstring() -> None:
    words = ("receive", "combine", "finish", "send")
    steps = [
        f"chunk {chunk}: " + ", ".join(w for w, does in zip(words, does, strict=True) if does)
        for chunk, *does in plan(0, 3, 1, 5)
    ]
    assert "; ".join(steps) in " ".join((plan.__doc__ or "").split())


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0], True),
        ([0] * 64, True),
        ([0, 1], True),
        ([0, 0, 1, 1], True),
        ([0] * 3 + [1] * 3, True),
        ([0] * 4 + [1] * 4, False),
        ([0] * 8 + [1] * 8, False),
        ([0, 1] * 8, True),  # every hand-over crosses
        (list(range(16)), True),
    ],
)
def test_originals_go_where_they_are_fewer_bytes_than_sums(nodes: list[int], expected: bool) -> None:
    assert shorter(nodes) is expected
