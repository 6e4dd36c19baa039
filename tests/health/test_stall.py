"""The stall detector's judgement, for made-up messages."""

import time

import pytest
from mpi4py import MPI

from allreduce.errors import CollectiveTimeoutError, RankLeftError
from allreduce.health import abort, dump
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


def test_a_call_that_ends_in_an_error_is_judged_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it tells the others it does not look for errors, like a call inside MPI, whose time-out ends the job."""
    ended = []
    monkeypatch.setattr(abort, "end_job", lambda text, code: ended.append(text))
    detector = StallDetector(MPI.COMM_SELF, 0.01)
    detector.active = True
    wait = detector.wait_record(7, raises=True)

    def check_twice() -> None:  # the first time a call is new
        for _ in range(2):
            detector.check_waits()
            time.sleep(0.6)

    wait.begin(NamedCall("all_reduce"))
    check_twice()
    detector.check_waits()
    assert isinstance(wait.error, CollectiveTimeoutError)
    wait.raises = False
    detector.check_waits()
    assert not ended
    wait.call, wait.count = NamedCall("the next one, inside MPI"), wait.count + 1
    check_twice()
    detector.check_waits()
    assert "the next one" in ended[0]
    detector.abandon()


def test_where_a_rank_stands_among_many_places() -> None:
    """The waits, the longest first, however many other records there are; without a wait the last call."""
    detector = StallDetector(MPI.COMM_SELF, 100.0)
    waits = [detector.wait_record(number) for number in range(40)]
    waits[30].begin(NamedCall("all_reduce"))
    waits[7].begin(NamedCall("broadcast"))
    assert ["all_reduce (call number 1)" in line for line in dump.status().splitlines()] == [True, False]
    waits[30].end()
    waits[7].end()
    dump.record(("0-1#1/5", 3, NamedCall("a call that was quick"), 1.0, 2.0))
    assert dump.status() == "this rank waits for no other rank; its last call: a call that was quick"
    detector.abandon()
