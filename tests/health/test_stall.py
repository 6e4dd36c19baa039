"""The stall detector's judgement, for made-up messages."""

import time

import pytest
from mpi4py import MPI

from allreduce.errors import RankLeftError
from allreduce.health.stall import StallDetector
from allreduce.health.status import LEFT, Fact, RankFacts
from allreduce.health.status_messages import KnownFacts
from allreduce.transport.wait import NamedCall


@pytest.mark.parametrize(("number", "ends"), [(7, True), (8, False), (0, True)])
def test_a_rank_leaves_one_place_or_all(number: int, ends: bool) -> None:
    """A failed call ends its backend, but not other backends' calls with the same rank."""
    detector = StallDetector(MPI.COMM_SELF, 100.0)
    fact = Fact(LEFT, number, text="its call failed")
    detector.messages._known[1] = KnownFacts(RankFacts(1, (fact,)), {fact: time.monotonic() - 50}, 1, 1)
    detector.messages._changes = 1
    wait = detector.wait_record(7, raises=True)
    wait.begin(NamedCall("all_reduce"))
    detector._judge(wait, NamedCall("all_reduce"), time.monotonic())
    assert wait.error is None  # of another call than the one that is under way
    assert wait.call is not None
    wait.since = time.monotonic()
    detector._judge(wait, wait.call, time.monotonic())
    assert isinstance(wait.error, RankLeftError) == ends
    detector.abandon()


def test_where_a_rank_stands_among_many_places() -> None:
    """Waits are listed first, however many other records there are."""
    detector = StallDetector(MPI.COMM_SELF, 100.0)
    waits = [detector.wait_record(number) for number in range(40)]
    for wait in waits[:20]:
        wait.begin(NamedCall("a call that was quick"))
        wait.new(2.0)
        wait.end()
        wait.new(3.0)
    waits[30].begin(NamedCall("all_reduce"))
    waits[30].new(1.0)
    assert "in all_reduce (call number 1)" in detector.status().splitlines()[0]
    assert "a call that was quick" in detector.status().splitlines()[1]
    detector.abandon()
